"""What a chat template shows, and how: found by rendering fixed conversations with it.

A template is a program; whether it drops the system message, shows tools, wants arguments as text or writes a thought
is known only by trying. All of it is tried once, when a renderer is built.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.base.errors import DataError
from stretto.chat.conversations import CALL, CALL_ID, TOOL, Message
from stretto.chat.templates import ChatTemplate

_WORD, _OTHER = "zqxhighvz", "zqxlowvz"  # texts that no template has
_TAG = r"(<[^<>\s]+>|\[/?[A-Z_]+\])"
_THOUGHT = "zqxthoughtvz"
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # ours, and what templates call it: gpt-oss, LFM2
_READS_IDS = re.compile(r"tool_call_id|\.id\b|\[['\"]id['\"]\]")
_CALL_IDS = (CALL_ID, "functions.look_up:0")  # Mistral's form, and Kimi's


class _CallShape(NamedTuple):
    """How a call has to be given for the template to show it."""

    as_text: bool
    content: str | None
    call_id: str


@dataclass(frozen=True)
class Thinking:
    """How a template writes a thought: `open` and `close` are the tags, the others with the blanks around them."""

    open: str = "<think>"
    close: str = "</think>"
    before: str = "<think>\n"
    after: str = "\n</think>\n\n"
    is_shown: bool = False
    """Whether the template shows `reasoning_content` of the last reply."""


@dataclass(frozen=True)
class Traits:
    """What one template does with messages."""

    hidden_roles: frozenset[str]
    """Roles whose messages the template drops without a word."""
    takes_parts: bool
    """Whether content is shown only as a list of parts."""
    arguments_as_text: bool
    """Whether the arguments of a call have to be JSON text."""
    empty_content: str | None
    """The content of a reply that has calls only."""
    shows_tools: bool
    shows_calls: bool
    shows_many_calls: bool
    """Whether a reply may have several calls; Llama 3.1's template refuses them, gpt-oss's shows the first."""
    call_id: str | None
    """An id of a call as the template takes it; None if it reads none."""
    end_text: str
    """What the template writes behind a reply, or before the next message if that is nothing."""
    ends_replies: bool
    """Whether `end_text` stands behind the last reply too, so that the model has to sample it."""
    around: tuple[str, str]
    """What the template writes before the text of a reply, and blanks behind it, which the model samples with it."""
    thinking: Thinking | None
    thought_key: str
    """The key of a message under which the template looks for a thought."""
    shows_all_beside_calls: bool
    """Whether a call may stand beside a thought and a text; gpt-oss's template refuses both together."""
    call_example: tuple[str, str] | None
    """A prompt and the text of a reply with `CALL`; None if the template shows no calls."""


def find_traits(template: ChatTemplate) -> Traits:
    """Ask a template what it shows.

    Raises: DataError if it renders not even one message of a user.
    """
    user = {"role": "user", "content": _WORD}
    takes_parts = _WORD not in (attempt(template, [user]) or "")
    if takes_parts:
        user = as_parts(user)
        if _WORD not in template.render([user]):
            raise DataError(f"the chat template ({template.where}) does not show the text of a user's message")
    has_tools = attempt(template, [user], [TOOL])
    calls = _call_shape(template, takes_parts)
    thought_key = _thought_key(template, user, takes_parts)
    end_text, ends_replies = _end_text(template, user, takes_parts)
    return Traits(
        hidden_roles=_hidden_roles(template, takes_parts),
        takes_parts=takes_parts,
        arguments_as_text=calls is not None and calls.as_text,
        empty_content=None if calls is None else calls.content,
        shows_tools=has_tools is not None and TOOL["function"]["name"] in has_tools,
        shows_calls=calls is not None,
        shows_many_calls=calls is None or _shows_many(template, calls, user),
        call_id=calls.call_id if calls is not None and _READS_IDS.search(template.text) else None,
        end_text=end_text,
        ends_replies=ends_replies,
        around=_around(template, user, takes_parts),
        thinking=_thinking(template, user, takes_parts, thought_key),
        thought_key=thought_key,
        shows_all_beside_calls=calls is None or _takes_all(template, calls, user, thought_key),
        call_example=None if calls is None else _call_example(template, calls, takes_parts),
    )


def attempt(
    template: ChatTemplate, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False
) -> str | None:
    """The text of a conversation; None if the template refuses it."""
    try:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except DataError:
        return None


def as_parts(message: Message) -> Message:
    """The message with its text as one part of a list."""
    if not isinstance(message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def shaped(message: Message, takes_parts: bool) -> Message:
    return as_parts(message) if takes_parts else message


def _hidden_roles(template: ChatTemplate, takes_parts: bool) -> frozenset[str]:
    hidden = set()
    for role in ("system", "tool"):
        message = shaped({"role": role, "content": _WORD, "name": "look_up", "tool_call_id": CALL_ID}, takes_parts)
        user = shaped({"role": "user", "content": _OTHER}, takes_parts)
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        messages = [message, user] if role == "system" else [user, called, message]
        text = attempt(template, messages, [TOOL] if role == "tool" else None)
        if text is not None and _WORD not in text:
            hidden.add(role)
    return frozenset(hidden)


def _end_text(template: ChatTemplate, user: Message, takes_parts: bool) -> tuple[str, bool]:
    reply = shaped({"role": "assistant", "content": _OTHER}, takes_parts)
    for messages in ([user, reply], [user, reply, user]):
        shown = attempt(template, messages) or ""
        after = shown[shown.rfind(_OTHER) + len(_OTHER) :] if _OTHER in shown else ""
        if after.strip():
            return after.partition(_WORD)[0], len(messages) == 2
    return "", False


def _around(template: ChatTemplate, user: Message, takes_parts: bool) -> tuple[str, str]:
    reply = shaped({"role": "assistant", "content": _OTHER}, takes_parts)
    asked = attempt(template, [user], add_generation_prompt=True)
    shown = attempt(template, [user, reply]) or ""
    if asked is None or not shown.startswith(asked) or _OTHER not in shown[len(asked) :]:
        return "", ""
    before, _, after = shown[len(asked) :].partition(_OTHER)
    behind = after[: len(after) - len(after.lstrip())] if after.strip() else ""
    return before, behind


def _call_shape(template: ChatTemplate, takes_parts: bool) -> _CallShape | None:
    """How a call has to be given; None if the template shows no calls."""
    name, word = CALL["function"]["name"], CALL["function"]["arguments"]["word"]
    user = shaped({"role": "user", "content": _WORD}, takes_parts)
    for shape in itertools.starmap(_CallShape, itertools.product((False, True), ("", None), _CALL_IDS)):
        text = attempt(template, [user, _reply_with_call(shape)], [TOOL]) or ""
        shown = text[text.rfind(_WORD) :] if _WORD in text else ""
        if name in shown and word in shown:
            return shape
    return None


def _shows_many(template: ChatTemplate, calls: _CallShape, user: Message) -> bool:
    reply = _reply_with_call(calls)
    other = {"function": CALL["function"] | {"arguments": {"word": _OTHER}}}
    both = [*reply["tool_calls"], with_arguments(reply["tool_calls"][0] | other, calls.as_text)]
    return _OTHER in (attempt(template, [user, reply | {"tool_calls": both}], [TOOL]) or "")


def _reply_with_call(shape: _CallShape) -> Message:
    call = with_arguments(CALL, shape.as_text) | {"id": shape.call_id}
    return {"role": "assistant", "content": shape.content, "tool_calls": [call]}


def with_arguments(call: Message, as_text: bool) -> Message:
    """The call with its arguments as JSON text, or as an object if they are one."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        arguments = parsed if isinstance(parsed, dict) else arguments
    return call | {"function": function | {"arguments": arguments}}


def _call_example(template: ChatTemplate, calls: _CallShape, takes_parts: bool) -> tuple[str, str] | None:
    user = shaped({"role": "user", "content": _WORD}, takes_parts)
    asked = attempt(template, [user], [TOOL], add_generation_prompt=True)
    shown = attempt(template, [user, _reply_with_call(calls)], [TOOL])
    if asked is None or shown is None:
        return None
    if shown.startswith(asked):
        return asked, shown[len(asked) :]
    return asked, shown[shown.rfind(_WORD) + len(_WORD) :]


def _thought_key(template: ChatTemplate, user: Message, takes_parts: bool) -> str:
    """The first key whose thought the template shows in the last reply; that of OpenAI's format if there is none."""
    reply = shaped({"role": "assistant", "content": _OTHER}, takes_parts)
    shown = (k for k in _THOUGHT_KEYS if _THOUGHT in (attempt(template, [user, reply | {k: _THOUGHT}]) or ""))
    return next(shown, _THOUGHT_KEYS[0])


def _takes_all(template: ChatTemplate, calls: _CallShape, user: Message, thought_key: str) -> bool:
    reply = _reply_with_call(calls) | {"content": _OTHER, thought_key: _THOUGHT}
    return attempt(template, [user, reply], [TOOL]) is not None


def _thinking(template: ChatTemplate, user: Message, takes_parts: bool, key: str) -> Thinking | None:
    """The tags of thoughts, None if the template has none."""
    reply = shaped({"role": "assistant", "content": _OTHER}, takes_parts) | {key: _THOUGHT}
    text = attempt(template, [user, reply]) or ""
    asked = attempt(template, [user], add_generation_prompt=True) or "?"
    at, end = text.rfind(_THOUGHT), text.rfind(_OTHER)
    if 0 <= at < end:
        before, after = text[:at], text[at + len(_THOUGHT) : end]
        begun = before.removeprefix(asked)
        if begun != before and begun.strip() and after.strip():
            return Thinking(begun.strip(), after.strip(), begun, after, is_shown=True)
        opened, closed = re.search(_TAG + r"\s*$", before), re.match(r"\s*" + _TAG, after)
        if opened is not None and closed is not None:
            return Thinking(opened[1], closed[1], before[opened.start(1) :], after, is_shown=True)
    return Thinking() if "</think>" in template.text else None
