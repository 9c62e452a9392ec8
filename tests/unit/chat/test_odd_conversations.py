"""What a policy samples and data hold although nobody expects it."""

from __future__ import annotations

import numpy as np
import pytest
from test_chat_templates import CHATML, renderer_of, sources
from test_families import renderer_of as renderer_of_family

from stretto.chat.conversations import ONE_TURN, TOOL
from stretto.chat.render import Renderer

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
