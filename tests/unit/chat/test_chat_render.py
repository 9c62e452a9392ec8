"""Messages <-> tokens: exactly the sampled tokens are trained, and turns extend each other token by token."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import ConfigError
from stretto.chat.render import build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import RendererSection
from stretto.config.sections.sft import LossMaskSection
from stretto.families.table import FAMILIES

ASSISTANT = LossMaskSection()
# The template strips every reply.
TEXT = (
    st.text(alphabet=string.ascii_letters + string.digits + string.punctuation + " ", min_size=1, max_size=12)
    .map(str.strip)
    .filter(lambda text: text and "<" not in text)
)
CONVERSATION = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_letters_tokenizer(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def renderer(directory):
    return build_renderer(directory, model_type="qwen3")


@pytest.fixture(scope="module")
def transformers_tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def turns(pairs):
    return [
        m for ask, reply in pairs for m in ({"role": "user", "content": ask}, {"role": "assistant", "content": reply})
    ]


def test_prompt_of_six_letters_is_eighteen_tokens(renderer):
    prompt = renderer.render_prompt([{"role": "user", "content": "fbacde"}])
    assert prompt.dtype == np.int32
    assert len(prompt) == 18
    assert (
        renderer.tokenizer.decode(prompt)
        == "<|im_start|>user\nfbacde<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_prompt_that_is_remembered_is_the_one_that_would_be_rendered(renderer, directory):
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    given = [{"role": "user", "content": "ab"}]
    for content, tools in (("ab", None), ("ab", None), ("cd", None), ("cd", [tool]), ("cd", [tool]), ("cd", None)):
        given[0]["content"] = content  # the environment's own messages, which it may change
        slow = build_renderer(directory, model_type="qwen3").render_prompt(given, tools)
        found = renderer.render_prompt(given, tools)
        assert found.tolist() == slow.tolist()
        found[:] = 0  # what is remembered is no one else's


@pytest.mark.heavy
@given(CONVERSATION)
@settings(max_examples=40)
def test_sampled_conversation_is_exactly_what_sft_trains(renderer, pairs):
    """Play the conversation as RL does (prompt, sample, extend) and compare with one SFT render."""
    tokenizer = renderer.tokenizer
    ids, is_sampled = np.zeros(0, np.int32), np.zeros(0, bool)
    prompt, completion = ids, ids
    for i, (ask, reply) in enumerate(pairs):
        new = [{"role": "user", "content": ask}]
        history = turns(pairs[:i])
        prompt = renderer.render_prompt(new) if i == 0 else renderer.extend(prompt, completion, history, new)
        assert np.array_equal(prompt[: len(ids)], ids)
        completion = np.asarray(tokenizer.encode(reply + "<|im_end|>"), np.int32)
        is_sampled = np.concatenate(
            [is_sampled, np.zeros(len(prompt) - len(ids), bool), np.ones(len(completion), bool)]
        )
        ids = np.concatenate([prompt, completion])
        assert renderer.parse(completion, prompt)["content"] == reply

    [(sft_ids, mask, num_messages)] = renderer.render_sft(turns(pairs), ASSISTANT).examples
    assert np.array_equal(sft_ids, ids) and np.array_equal(mask, is_sampled)
    assert num_messages == 2 * len(pairs)


@given(CONVERSATION, st.booleans())
@settings(max_examples=25)
def test_transformers_chat_template_gives_the_same_tokens(renderer, transformers_tokenizer, pairs, has_system):
    messages = ([{"role": "system", "content": "be brief"}] if has_system else []) + turns(pairs)
    template = transformers_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    [(ids, _, _)] = renderer.render_sft(messages, ASSISTANT).examples
    assert template == [*ids.tolist(), *renderer.encode("\n").tolist()]
    prompt = transformers_tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)
    assert prompt["input_ids"] == renderer.render_prompt(messages[:-1]).tolist()


def test_what_a_family_has_no_choice_of_is_refused(directory):
    with pytest.raises(ConfigError, match=r"clear_thinking = false: .*'qwen3'"):
        build_renderer(directory, RendererSection(clear_thinking=False), "qwen3")
    wrong = {"thinking_retension": "all"}
    with pytest.raises(ConfigError, match=r"settings.thinking_retension: .*thinking_retention"):
        build_renderer(directory, RendererSection(settings=wrong), "qwen3")
    with pytest.raises(ConfigError, match=r"settings.thinking_retention = 'some'"):
        build_renderer(directory, RendererSection(settings={"thinking_retention": "some"}), "qwen3")


def test_thinking_of_earlier_turns_stays_where_the_settings_say_so(directory):
    kept = build_renderer(directory, RendererSection(settings={"thinking_retention": "all"}), "qwen3")
    assert kept._backend._backend.config.thinking_retention == "all"


def test_template_agrees_on_thinking_and_tool_results(directory, transformers_tokenizer):
    thinking = build_renderer(directory, RendererSection(enable_thinking=True), "qwen3")
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "reasoning_content": "so"},
    ]
    for end in (1, 2, 4, 5, 7):
        theirs = transformers_tokenizer.apply_chat_template(
            conversation[:end], enable_thinking=True, add_generation_prompt=True, return_dict=True
        )
        assert theirs["input_ids"] == thinking.render_prompt(conversation[:end]).tolist()


def test_loss_mask_of_other_roles_covers_their_text_and_nothing_of_the_template(renderer):
    messages = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "done"},
    ]
    trained = {}
    for role in ("system", "user", "assistant", "tool"):
        only = LossMaskSection(**{r: r == role for r in ("system", "user", "assistant", "tool")})
        [(ids, mask, _)] = renderer.render_sft(messages, only).examples
        trained[role] = renderer.tokenizer.decode(ids[mask])
    assert trained == {"system": "sys", "user": "ask", "assistant": "call<|im_end|>done<|im_end|>", "tool": "42"}


def test_cut_off_completion_is_closed_before_the_next_turn(renderer):
    prompt = renderer.render_prompt([{"role": "user", "content": "a"}])
    cut = renderer.tokenizer.encode("abc")
    history = turns([("a", "abc")])
    extended = renderer.extend(prompt, cut, history, [{"role": "user", "content": "go on"}])
    assert np.array_equal(extended[: len(prompt) + 3], [*prompt, *cut])
    assert extended[len(prompt) + 3] == renderer.tokenizer.token_id("<|im_end|>")


def test_tool_calls_are_parsed_and_broken_ones_kept_as_text(renderer):
    whole = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    message = renderer.parse(renderer.tokenizer.encode(f"ok\n{whole}\n<tool_call>\n{{nope\n</tool_call><|im_end|>"))
    assert message["content"].strip() == "ok"
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert message["unparsed_tool_calls"] == ["{nope"]


def test_renderer_stops_at_the_end_of_turn(renderer):
    assert renderer.stop_ids == (
        renderer.tokenizer.token_id("<|im_end|>"),
        renderer.tokenizer.token_id("<|endoftext|>"),
    )


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_models_from_scratch_of_every_family_speak_with_the_tokens_of_their_tokenizer(directory, renderer, model_type):
    messages = [{"role": "user", "content": "hi"}]
    its = build_renderer(directory, model_type=model_type)
    assert np.array_equal(its.render_prompt(messages), renderer.render_prompt(messages))


def test_unknown_family_and_unfit_vocabulary_are_refused(directory):
    with pytest.raises(ConfigError, match="'nonsense' is not a known family"):
        build_renderer(directory, RendererSection(name="nonsense"))
    with pytest.raises(ConfigError, match="cannot tell sampled tokens"):
        build_renderer(directory, RendererSection(name="default"))
    with pytest.raises(ConfigError, match="does not fit"):
        build_renderer(load_tokenizer(directory), RendererSection(name="glm-4.5"))
