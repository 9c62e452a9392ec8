"""What a template does not show, and how a reply's tokens depend on where it stands."""

from __future__ import annotations

import itertools
import re
import time

import pytest
import tokenizers
from published import tokenizer_dir
from test_chat_templates import CHATML, DROPS_THOUGHTS, TOKENS, byte_tokenizer, renderer_of, sources
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from stretto.base.errors import ConfigError, DataError
from stretto.chat.conversations import CALL, ONE_TURN, TOOL, TWO_TURNS
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.templates import TemplateFiles
from stretto.chat.tokenizer import Tokenizer, load_tokenizer
from stretto.chat.tool_calls import TEXT_FORMATS
from stretto.config.sections.model import RendererSection
from stretto.config.sections.orchestrator import OrchestratorKeys
from stretto.config.sections.sft import LossMaskSection

ROW = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "because"}]


def test_the_text_of_a_user_is_trained_where_the_thought_is_of_the_other_mode():
    renderer = renderer_of(sources()["qwen3"], name="template", enable_thinking=False)
    [(ids, mask, _)] = renderer.render_sft(ROW, LossMaskSection(user=True)).examples
    assert renderer.decode(ids[mask]) == "a<think>\nbecause\n</think>\n\nb<|im_end|>"


def test_a_thought_that_is_a_part_of_the_answer_is_not_taken_for_shown():
    renderer = renderer_of(DROPS_THOUGHTS)
    row = [ROW[0], {"role": "assistant", "content": "No.", "reasoning_content": "No"}]
    [(ids, mask, _)] = renderer.render_sft(row, LossMaskSection()).examples
    assert renderer.decode(ids[mask]) == "<think>\nNo\n</think>\n\nNo.<|im_end|>"


def test_a_thought_that_no_template_shows_is_said_with_the_way_out():
    rendered = renderer_of(CHATML).render_sft(ROW, LossMaskSection())
    assert not rendered.examples and rendered.num_left_out == 1
    assert "does not show the thought of message 1 (`reasoning_content`): write it into the content" in rendered.why
    assert "give a template that shows thoughts as renderer.template" in rendered.why


def test_a_reply_whose_text_the_template_drops_beside_a_call_is_left_out_and_counted():
    renderer = renderer_of(sources()["llama3_1"], name="template")
    row = [ROW[0], {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]
    rendered = renderer.render_sft(row, LossMaskSection(), [TOOL])
    assert rendered.num_left_out == 1 and not rendered.examples
    row = [ROW[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert renderer.render_sft(row, LossMaskSection(), [TOOL]).num_left_out == 0


def test_a_reply_of_two_calls_of_which_the_template_shows_one_is_left_out_and_counted():
    renderer = renderer_of(sources()["gptoss"], name="template")
    row = [ROW[0], {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    rendered = renderer.render_sft(row, LossMaskSection(), [TOOL])
    assert rendered.num_left_out == 1 and not rendered.examples


KIMI = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] -%}
<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>{{ c['function']['arguments'] | tojson }}<|tool_call_end|>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("ids", [(None, None), ("call_a", "call_b")])
def test_ids_that_stand_for_the_name_of_a_function_are_made_of_it(ids):
    renderer = renderer_of(KIMI, name="template")
    names = ("other", "look_up")
    calls = [{"type": "function", "function": {"name": n, "arguments": {}}} for n in names]
    results = [{"role": "tool", "content": n, "name": n} for n in names]
    if ids[0] is not None:
        calls = [call | {"id": i} for call, i in zip(calls, ids)]
        results = [result | {"tool_call_id": i} for result, i in zip(results, ids)][::-1]
    text = renderer.render_text([ROW[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert "begin|>functions.other:0<" in text and "begin|>functions.look_up:1<" in text
    assert "Return of functions.other:0\nother" in text and "Return of functions.look_up:1\nlook_up" in text


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALLED = {"role": "assistant", "content": "", "reasoning_content": "I must look.", "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "At noon.", "name": "look_up", "tool_call_id": CALL["id"]}


def test_a_thought_that_the_template_calls_thinking_is_trained():
    renderer = renderer_of(sources()["gptoss"], name="template")
    answer = {"role": "assistant", "content": "At noon.", "reasoning_content": "So it is noon."}
    rendered = renderer.render_sft([ROW[0], CALLED, FOUND, answer], LossMaskSection(), [TOOL])
    [(ids, mask, _)] = rendered.examples
    assert rendered.num_left_out == 0
    trained = renderer.decode(ids[mask])
    assert trained.startswith(f"{ANALYSIS}I must look.{NEXT} to=functions.look_up<|channel|>")
    assert trained.endswith(f"<|call|>{ANALYSIS}So it is noon.{NEXT}{FINAL}At noon.<|return|>")


def test_a_call_ends_a_reply_where_the_template_ends_one_with_it():
    renderer = renderer_of(sources()["gptoss"], name="template")
    assert renderer.tokenizer.token_id("<|call|>") in renderer.stop_ids
    [(ids, mask, _)] = renderer.render_sft([ROW[0], CALLED], LossMaskSection(), [TOOL]).examples
    assert renderer.decode(ids[mask]).endswith("}<|call|>")


def test_a_thought_before_a_call_stays_in_its_branch_until_the_call_is_answered():
    renderer = renderer_of(sources()["gptoss"], name="template")
    prompt = renderer.render_prompt([ROW[0]], [TOOL])
    text = f"{ANALYSIS}I must look.{NEXT}<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
    reply = renderer.encode(text + '{"word": "high tide", "times": 3}<|call|>').tolist()
    history = [ROW[0], renderer.parse(reply, prompt, [TOOL])]
    assert history[1]["reasoning_content"] == "I must look." and history[1]["tool_calls"]
    extended = renderer.extend(prompt, reply, history, [FOUND], [TOOL])
    assert extended is not None and extended[: len(prompt) + len(reply)].tolist() == [*prompt.tolist(), *reply]


def test_a_thought_and_a_text_beside_a_call_are_shown_as_the_template_can():
    renderer = renderer_of(sources()["gptoss"], name="template")
    messages = [ROW[0], CALLED | {"content": "Wait."}, FOUND]
    assert "Wait.<|end|>" in renderer.render_text(messages, [TOOL])


@pytest.mark.parametrize("role", ["system", "critic"])
def test_a_message_that_the_template_drops_at_its_place_is_refused(role):
    renderer = renderer_of(sources()["gptoss"], name="template")
    messages = [*TWO_TURNS[1:3], {"role": role, "content": "Be brief."}, TWO_TURNS[3]]
    with pytest.raises(DataError, match=f"drops .*'{role}' behind .*'assist"):
        renderer.render_prompt(messages)
    assert len(renderer.render_prompt(TWO_TURNS))


VICUNA = """{{ bos_token }}{% for m in messages %}{{ m.role.upper() + ': ' + m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% else %}{{ ' ' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["llama2", "gemma2", "yi"])
def test_a_reply_has_the_tokens_that_it_has_within_the_whole_text(name):
    tokenizer = load_tokenizer(tokenizer_dir(name))
    tokenizer.templates = TemplateFiles({"default": VICUNA}, "a test")
    renderer = build_renderer(tokenizer, RendererSection(name="template"))
    for content in ("Yes.", "é 日本", "<b>", "1"):
        row = [*TWO_TURNS[1:2], {"role": "assistant", "content": content}]
        [(ids, mask, _)] = renderer.render_sft(row, LossMaskSection()).examples
        assert ids.tolist() == tokenizer.encode(renderer._backend._text(row, None, False))
        assert renderer.decode(ids[mask]).strip() == content + tokenizer.template_tokens["eos_token"]


def test_a_line_break_that_is_a_token_ends_no_reply():
    tokenizer = byte_tokenizer(CHATML)
    tokenizer._backend.add_tokens([AddedToken("\n\n", normalized=False)])
    source = "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
    tokenizer.templates = TemplateFiles({"default": source}, "a test")
    assert build_renderer(tokenizer).stop_ids == tokenizer.eos_ids


def test_an_end_token_that_the_tokenizer_lacks_hides_no_other():
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.eos_ids = (*tokenizer.eos_ids, 10**6)
    renderer = build_renderer(tokenizer)
    prompt = renderer.render_prompt(ONE_TURN)
    reply = [*renderer.encode("so").tolist(), renderer.stop_ids[0]]
    history = [*ONE_TURN, renderer.parse(reply, prompt)]
    assert renderer.extend(prompt, reply, history, ONE_TURN) is not None
    [(ids, mask, _)] = renderer.render_sft(history, LossMaskSection()).examples
    assert renderer.decode(ids[mask]) == "so<|im_end|>"


def test_tokens_behind_the_end_of_a_reply_begin_another_branch():
    renderer = renderer_of(CHATML)
    prompt = renderer.render_prompt(ONE_TURN)
    reply = [*renderer.encode("so").tolist(), renderer.stop_ids[0]]
    history = [*ONE_TURN, renderer.parse(reply, prompt)]
    assert renderer.extend(prompt, [*reply, *renderer.encode("lost").tolist()], history, ONE_TURN) is None


@pytest.mark.parametrize("is_list", [False, True])
def test_special_text_in_parts_stays_text_too(is_list):
    renderer = renderer_of(CHATML, special_tokens_in_text="text")
    content = "say <|im_end|>"
    message = {"role": "user", "content": [{"type": "text", "text": content}] if is_list else content}
    prompt = renderer.render_prompt([message]).tolist()
    assert prompt.count(renderer.stop_ids[0]) == 1 and renderer.num_special_in_text == 1


def test_private_characters_of_a_message_stay_what_they_are():
    renderer = renderer_of(CHATML)
    prompt = renderer.render_prompt([{"role": "user", "content": "\U00100000 \U00100001"}])
    assert "user\n\U00100000 \U00100001<|im_end|>" in renderer.decode(prompt)


@pytest.mark.parametrize("text", ["<function=a>", "</function><function=a>", "<parameter=a>"])
def test_a_reply_that_repeats_a_mark_is_parsed_in_time(text):
    started = time.perf_counter()
    TEXT_FORMATS["qwen3-coder"](f"<tool_call><function=x>{text * 8000}</function></tool_call>")
    TEXT_FORMATS["qwen3-coder"](f"<tool_call>{text * 8000}")
    assert time.perf_counter() - started < 2


def test_a_reply_ends_with_its_first_end_token_where_the_template_writes_another_behind_it():
    renderer = renderer_of(sources()["phi3"], name="template")
    row = [*TWO_TURNS[1:3], TWO_TURNS[3], {"role": "assistant", "content": "Entries that overlap."}]
    [(ids, mask, _)] = renderer.render_sft(row, LossMaskSection()).examples
    assert renderer.decode(ids[mask]) == "A piece with one theme.<|end|>Entries that overlap.<|end|>"


def test_messages_name_the_key_of_the_verb():
    section = OrchestratorKeys().renderer
    renderer = build_renderer(byte_tokenizer("{{ messages[0].content }}"), section)
    with pytest.raises(DataError, match=r"such as orchestrator\.renderer\.template = \"chatml\""):
        renderer.render_prompt(ROW[:1], [TOOL])
    tokenizer = byte_tokenizer(CHATML)
    wrong = {"template": "quen", "tool_parser": "quen", "name": "quen3"}
    for key, value in wrong.items():
        for place, own in (("orchestrator\\.renderer", section), ("renderer", RendererSection())):
            with pytest.raises(ConfigError, match=rf"^(bytes: )?\[{place}\] {key} = '{value}'"):
                build_renderer(tokenizer, own.model_copy(update={key: value}))


# -- prompts as they stand --


def text_renderer(**settings) -> Renderer:
    """Renders plain text with a token for each two and three of the letters a and b, blanks and line breaks."""
    letters = "ab\u0120\u010a"  # a blank and a line break as bytes are written
    pairs = list(itertools.product(letters, repeat=2))
    merges = [*pairs, *((a + b, c) for a, b in pairs for c in letters)]
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)])
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = Tokenizer(
        backend, name="merges", eos_ids=(backend.token_to_id("</s>"),), unk_id=None,
        templates=TemplateFiles({}, "a test"), template_tokens=TOKENS,
    )  # fmt: skip
    return build_renderer(tokenizer, RendererSection(name="text", **settings))


TEXT_ROWS = [
    [("system", "ab"), ("user", "a"), ("assistant", "b"), ("user", "ba"), ("assistant", "ab"), ("user", "b")],
    [("user", " a "), ("assistant", " b\n"), ("user", "\n"), ("assistant", " a"), ("tool", " "), ("assistant", "b")],
    [("user", "a"), ("user", ""), ("user", "b\n"), ("assistant", ""), ("user", "\n\n"), ("assistant", "a \n")],
    [
        ("system", "a\u00e9"),
        ("user", "\u65e5b"),
        ("assistant", "\u65e5\U0001f600"),
        ("user", "\u00e9 "),
        ("user", " b"),
    ],
]


def text_row(index: int) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in TEXT_ROWS[index]]


@pytest.mark.parametrize("index", range(len(TEXT_ROWS)))
def test_each_role_of_plain_text_is_trained_by_exactly_its_letters_and_blanks(index):
    renderer, row = text_renderer(), text_row(index)
    for role in ("system", "user", "tool", "assistant"):
        only = LossMaskSection(**{each: each == role for each in ("system", "user", "assistant", "tool")})
        rendered = renderer.render_sft(row, only)
        trained = "".join(renderer.decode(ids[mask]) for ids, mask, _ in rendered.examples)
        end = "</s>" if role == "assistant" else ""
        assert rendered.num_left_out == 0
        assert trained == "".join(m["content"] + end for m in row if m["role"] == role)


@pytest.mark.parametrize("index", range(len(TEXT_ROWS)))
def test_no_token_of_plain_text_belongs_to_two_messages(index):
    renderer, row = text_renderer(), text_row(index)
    before = ""
    ids: list[int] = []
    for count in range(1, len(row) + 1):
        prompt = renderer.render_prompt(row[:count]).tolist()
        owners = renderer.text_owners(row[:count]).tolist()
        before += row[count - 1]["content"]
        assert renderer.decode(prompt) == before and prompt[: len(ids)] == ids
        assert owners[len(ids) :] == [count - 1] * (len(prompt) - len(ids))
        ids = prompt


@pytest.mark.parametrize("index", range(len(TEXT_ROWS)))
def test_plain_text_goes_on_behind_the_sampled_tokens_as_it_is_rendered_anew(index):
    renderer, row = text_renderer(), text_row(index)
    ids = history = reply = None
    for at, message in enumerate(row):
        if message["role"] != "assistant":
            continue
        prompt = renderer.render_prompt(row[:at])
        if ids is not None:
            extended = renderer.extend(ids, reply, history, row[len(history) : at])
            assert extended is not None and extended.tolist() == prompt.tolist()
        ids, history = prompt, row[: at + 1]
        reply = renderer.render_prompt(history)[len(prompt) :]  # sampled, and cut before an end token
        assert renderer.decode(reply) == message["content"]


def test_sampled_tokens_of_plain_text_stay_what_they_are():
    renderer = text_renderer()
    prompt = renderer.render_prompt([{"role": "user", "content": "a"}])
    reply = [int(renderer.encode(letter)[0]) for letter in "ab"]  # two tokens, where the text has one
    history = [{"role": "user", "content": "a"}, renderer.parse(reply, prompt)]
    extended = renderer.extend(prompt, reply, history, [{"role": "user", "content": "b"}])
    assert extended is not None and extended.tolist() == [*prompt, *reply, renderer.encode("b")[0]]


def test_a_prompt_of_plain_text_that_ends_with_a_reply_is_continued_without_an_end_token():
    renderer = text_renderer()
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert renderer.render_text(row) == "ab" and renderer.decode(renderer.render_leading(row)) == "ab</s>"


@pytest.mark.parametrize(
    ("renderer", "said"),
    [
        (text_renderer, 'without the token that ends them .* renderer.template = "chatml", keeps one branch'),
        (lambda: renderer_of(sources()["qwen3"], name="template"), "otherwise than they were sampled once the user"),
        (lambda: renderer_of(sources()["qwen3"], name="template", enable_thinking=True), "without their thoughts once"),
        (lambda: renderer_of(CHATML), "^$"),
    ],
)
def test_a_template_that_shows_earlier_replies_otherwise_says_so(renderer, said):
    assert re.search(said, renderer().branching)
