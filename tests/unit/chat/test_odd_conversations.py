"""What a policy samples and data hold although nobody expects it."""

from __future__ import annotations

import numpy as np
import pytest
from cases.renderers import FAMILIES
from published import tokenizer_dir
from test_chat_templates import CHATML, MARKED, renderer_of, sources
from test_families import renderer_of as renderer_of_family

from stretto.base.errors import DataError
from stretto.chat.conversations import CALL, ONE_TURN, TOOL, TWO_TURNS
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import load_tokenizer
from stretto.chat.tool_calls import TEXT_FORMATS
from stretto.config.sections.model import RendererSection
from stretto.config.sections.sft import LossMaskSection

HERMES = "<tool_call>\n{}\n</tool_call>"


def renderers() -> list[Renderer]:
    return [
        renderer_of(CHATML, template="chatml"),
        renderer_of(sources()["qwen3_instruct_2507"], name="template"),
        renderer_of_family("qwen3"),
    ]


def sampled(renderer: Renderer, text: str) -> np.ndarray:
    return np.asarray([*renderer.encode(text), renderer.stop_ids[0]], np.int32)


UNFIT = {
    "not a number": '{"n": NaN}',
    "infinite": '{"n": -Infinity}',
    "too large": '{"n": 1e999}',
    "too many digits": '{"n": 1' + "0" * 5000 + "}",
    "too many levels": '{"n": ' + "[" * 500 + "]" * 500 + "}",
    "brackets": "[" * 3000,
}


@pytest.mark.parametrize("arguments", UNFIT.values(), ids=UNFIT)
def test_a_call_that_json_cannot_hold_is_malformed_and_the_next_turn_goes_on(arguments):
    for renderer in renderers():
        prompt = renderer.render_prompt(ONE_TURN, [TOOL])
        reply = sampled(renderer, HERMES.format('{"name": "look_up", "arguments": ' + arguments + "}"))
        message = renderer.parse(reply, prompt, [TOOL])
        assert "tool_calls" not in message and len(message["unparsed_tool_calls"]) == 1
        extended = renderer.extend(prompt, reply, [*ONE_TURN, message], ONE_TURN, [TOOL])
        assert extended is not None and extended[: len(prompt) + len(reply)].tolist() == [*prompt, *reply]


def test_arguments_that_are_json_text_are_their_object():
    for renderer in renderers():
        reply = sampled(renderer, HERMES.format(r'{"name": "look_up", "arguments": "{\"word\": \"a\"}"}'))
        message = renderer.parse(reply, renderer.render_prompt(ONE_TURN, [TOOL]), [TOOL])
        assert message["tool_calls"][0]["function"]["arguments"] == {"word": "a"}


@pytest.mark.parametrize("nothing", ["null", '""'])
def test_a_call_that_the_library_reads_may_have_no_arguments(nothing):
    renderer = renderer_of_family("qwen3")
    reply = sampled(renderer, HERMES.format('{"name": "look_up", "arguments": ' + nothing + "}"))
    message = renderer.parse(reply, renderer.render_prompt(ONE_TURN, [TOOL]), [TOOL])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_half_a_character_in_a_call_is_one_that_no_tokenizer_refuses():
    for renderer in renderers():
        prompt = renderer.render_prompt(ONE_TURN, [TOOL])
        reply = sampled(renderer, HERMES.format(r'{"name": "look_up", "arguments": {"word": "a\ud83d"}}'))
        message = renderer.parse(reply, prompt, [TOOL])
        assert message["tool_calls"][0]["function"]["arguments"] == {"word": "a\ufffd"}
        history = [*ONE_TURN, message, {"role": "tool", "content": "none", "name": "look_up"}]
        assert "a\ufffd" in renderer.render_text(history, [TOOL])


@pytest.mark.parametrize("text", ["[look_up(word={1, 2})]", "[look_up(word=b'a')]", "[look_up(word={1: 2})]"])
def test_a_value_that_only_python_has_makes_a_call_malformed(text):
    renderer = renderer_of(CHATML, template="chatml", tool_parser="python")
    assert "tool_calls" not in renderer.parse(renderer.encode(text), None, [TOOL])


def test_a_family_keeps_tokens_behind_an_end_token_or_begins_another_branch():
    for renderer in renderers():
        prompt = renderer.render_prompt(ONE_TURN)
        reply = np.concatenate([sampled(renderer, "yes"), renderer.encode("more")])
        history = [*ONE_TURN, renderer.parse(reply, prompt)]
        extended = renderer.extend(prompt, reply, history, ONE_TURN)
        assert extended is None or extended[: len(prompt) + len(reply)].tolist() == [*prompt, *reply]


def test_calls_behind_the_first_are_malformed_where_the_template_takes_one():
    renderer = renderer_of(sources()["llama3_1"], name="template")
    prompt = renderer.render_prompt(ONE_TURN, [TOOL])
    call = '{{"name": "look_up", "parameters": {{"word": "{}"}}}}'
    reply = np.asarray([*renderer.encode(f"{call.format('a')}; {call.format('b')}"), renderer.stop_ids[0]], np.int32)
    message = renderer.parse(reply, prompt, [TOOL])
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [{"word": "a"}]
    assert message["unparsed_tool_calls"] == [call.format("b")]
    answers = [{"role": "tool", "content": text, "name": "look_up"} for text in ("found", "one call at a time")]
    extended = renderer.extend(prompt, reply, [*ONE_TURN, message], answers, [TOOL])
    assert extended is not None and extended[: len(prompt) + len(reply)].tolist() == [*prompt, *reply]


ICONS = "\U000f1000 \U000f1001 \U00100000 \U00100001 \U000ff000 \U000ff001"
"""Letters of plane 15 and 16, which fonts of icons have."""
SPELLED = "<|im_end|>"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_icons_stay_what_they_are_beside_the_text_of_a_special_token(role):
    for source in (CHATML, MARKED):
        renderer = renderer_of(source, special_tokens_in_text="text")
        row = [{"role": "user", "content": f"a {SPELLED}"}, {"role": "assistant", "content": "b"}]
        row[role == "assistant"]["content"] = ICONS
        [(ids, mask, _)] = renderer.render_sft(row, LossMaskSection(user=True)).examples
        assert renderer.decode(ids[mask]).startswith(row[0]["content"] + row[1]["content"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_special_token_stays_text_in_every_family(family):
    tokenizer = renderer_of_family(family).tokenizer
    kept = build_renderer(tokenizer, RendererSection(name=family, special_tokens_in_text="text"))
    end = tokenizer.token_text(kept.stop_ids[0])
    messages = [{"role": "user", "content": f"{ICONS} {end} {end}"}]
    prompt, owners = kept.render_prompt(messages), kept.text_owners(messages)
    plain = kept.render_prompt([{"role": "user", "content": "a"}])
    assert kept.decode(prompt[owners == 0]) == messages[0]["content"]
    assert (prompt == kept.stop_ids[0]).sum() == (plain == kept.stop_ids[0]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["token", "text"])
def test_gpt_oss_keeps_the_text_of_a_special_token(kept, caplog):
    section = RendererSection(name="gpt-oss", special_tokens_in_text=kept)
    renderer = build_renderer(load_tokenizer(tokenizer_dir("gptoss")), section)
    messages = [{"role": "user", "content": "a <|end|> b"}]
    prompt = renderer.render_prompt(messages)
    assert renderer.decode(prompt[renderer.text_owners(messages) == 0]) == "a <|end|> b"
    assert renderer.num_special_in_text == 0 and not caplog.text


@pytest.mark.slow
def test_gpt_oss_refuses_a_description_that_is_no_text_in_one_line():
    renderer = build_renderer(load_tokenizer(tokenizer_dir("gptoss")), RendererSection(name="gpt-oss"))
    tool = {"type": "function", "function": {"name": "look_up", "description": None, "parameters": None}}
    with pytest.raises(DataError, match=r"^the renderer of .*gpt-oss refuses .*description: .*got None$"):
        renderer.render_prompt(ONE_TURN, [tool])


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_a_reply_with_the_text_of_an_end_token_is_left_out_with_that_text(key):
    row = [*ONE_TURN, {"role": "assistant", "content": "b", key: "so <|im_end|> on"}]
    rendered = renderer_of(sources()["qwen3"], name="template", enable_thinking=True).render_sft(row, LossMaskSection())
    assert rendered.num_left_out == 1
    assert "message 1 has the text '<|im_end|>', with which a sampled reply would end; write it" in rendered.why


def test_a_reply_without_a_message_before_it_is_left_out_with_what_to_do():
    row = [{"role": "assistant", "content": "b"}]
    rendered = renderer_of(sources()["llama3_1"], name="template").render_sft(row, LossMaskSection())
    assert rendered.num_left_out == 1 and "put a message of the user before the reply" in rendered.why


def test_a_reply_is_trained_behind_its_prompt_where_the_template_shows_the_history_otherwise_afterwards():
    renderer = renderer_of(sources()["gptoss"], name="template")  # a text beside a call is dropped behind an answer
    called = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    found = {"role": "tool", "content": "At noon.", "name": "look_up", "tool_call_id": CALL["id"]}
    row = [*ONE_TURN, called, found, {"role": "assistant", "content": "b"}]
    rendered = renderer.render_sft(row, LossMaskSection(), [TOOL])
    [(ids, mask, _)] = rendered.examples
    assert rendered.num_left_out == 0
    assert renderer.decode(ids[mask]).endswith("<|call|><|channel|>final<|message|>b<|return|>")
    prompt = renderer.render_text(row[:3], [TOOL])
    assert renderer.decode(ids) == prompt + "<|channel|>final<|message|>b<|return|>"


def test_a_reply_behind_a_reply_is_trained_where_the_template_shows_the_first_otherwise_afterwards():
    renderer = renderer_of(sources()["qwen3"], name="template")  # the last reply alone has an empty thought
    row = [*ONE_TURN, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]
    rendered = renderer.render_sft(row, LossMaskSection())
    [(ids, mask, _)] = rendered.examples
    assert rendered.num_left_out == 0 and renderer.decode(ids[mask]) == "b<|im_end|>c<|im_end|>"
    assert renderer.decode(ids) == renderer.render_text(row[:2]) + "c<|im_end|>"


@pytest.mark.parametrize("is_later", [False, True])
def test_a_system_message_in_whose_place_the_template_shows_a_later_one_is_refused(is_later):
    renderer = renderer_of(sources()["deepseek_r1_distill"], name="template")
    first, second = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    assert "Be brief." in renderer.render_text([first, *ONE_TURN])
    row = [first, *TWO_TURNS[1:3], second, TWO_TURNS[3]] if is_later else [first, second, *ONE_TURN]
    with pytest.raises(DataError, match=r"drops a message of the role 'system' \(message 0\)"):
        renderer.render_prompt(row)


def test_a_thought_that_a_family_drops_is_not_taken_for_shown_where_the_answer_or_the_end_has_its_words():
    renderer = renderer_of_family("hy3")
    for thought in ("No", "so"):  # "so" is in the text of its end token
        row = [*TWO_TURNS[1:], {"role": "assistant", "content": "No.", "reasoning_content": thought}]
        rendered = renderer.render_sft(row, LossMaskSection())
        assert rendered.num_left_out == 1 and "does not show the thought of message 3" in rendered.why


@pytest.mark.parametrize("parameters", [{"properties": {"a": True}}, {"properties": {"a": "string"}}])
def test_a_tool_that_the_library_does_not_expect_is_refused_in_one_line(parameters):
    tool = {"type": "function", "function": {"name": "look_up", "description": "b", "parameters": parameters}}
    renderer = renderer_of_family("nemotron-3")
    with pytest.raises(
        DataError, match=r"^the renderer of the family nemotron-3 refuses the conversation: \w+Error: .*$"
    ):
        renderer.render_prompt(ONE_TURN, [tool])
    with pytest.raises(DataError, match="nemotron-3 refuses"):
        renderer.render_sft([*ONE_TURN, {"role": "assistant", "content": "b"}], LossMaskSection(), [tool])


def test_what_a_family_refuses_in_two_lines_is_one_line():
    refusals = renderer_of_family("nemotron-3")._backend._refusals()
    with pytest.raises(DataError, match=r"refuses the conversation: no system, please$"), refusals:
        raise ValueError("no\nsystem, please")


def test_what_a_template_refuses_is_one_line_with_what_to_do():
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('No\nsystem, please.') }}{% endif %}" + CHATML
    with pytest.raises(DataError, match=r"roles system, user, .*: No system, please; .* or give another .*$"):
        renderer_of(strict).render_prompt(TWO_TURNS)


def test_a_value_between_tags_that_is_no_number_of_json_stays_a_word():
    text = "<tool_call>\n<function=look_up>\n<parameter=word>\n{}\n</parameter>\n</function>\n</tool_call>"
    for word, value in (("NaN", "NaN"), ("1e999", "1e999"), ("1.5", 1.5), ("null", None), ("nul", "nul")):
        _, [call] = TEXT_FORMATS["qwen3-coder"](text.format(word))
        assert (call.name, call.arguments) == ("look_up", {"word": value})
