"""Whose text is whose: the turns of a rendered conversation, by the marks that chat templates write before each.

A tool's answer is a turn of the tool, also where a template (Qwen's, for example) writes it as one of the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(
    r"<\|im_start\|>(\w+)\n"
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*"
    r"|<start_of_turn>(\w+)\n"
    r"|<\|start_of_role\|>(\w+)<\|end_of_role\|>"
    r"|<\|start\|>(\w+)(?:[^<\n]*(?:<\|channel\|>[^<\n]*)?(?:<\|constrain\|>[^<\n]*)?<\|message\|>|\Z)"
    r"|<\|(system|user|assistant|observation|tool)\|>\n?"
    r"|<\|im_(user|assistant)\|>[^<\n]*<\|im_middle\|>"
    r"|<\|im_system\|>(system|tool_declare)<\|im_middle\|>"
    r"|<\|(im_system)\|>[^<\n]*<\|im_middle\|>"
    r"|\]~b\](\w+)[^\n]*\n"
    r"|<｜(User|Assistant)｜>"
    r"|(?:<｜tool▁outputs▁begin｜>)?<｜(tool▁output▁begin)｜>"
    r"|<｜(tool▁output▁end)｜>(?!\s*<｜tool▁output▁begin｜>)(?:\s*<｜tool▁outputs▁end｜>)?"
    r"|\[(SYSTEM_PROMPT|AVAILABLE_TOOLS|/?INST|TOOL_RESULTS|/TOOL_RESULTS(?!\]\s*\[TOOL_RESULTS\]))\] ?"
)
_ROLES = {
    "model": "assistant", "ai": "assistant", "User": "user", "Assistant": "assistant", "INST": "user",
    "/INST": "assistant", "developer": "system", "SYSTEM_PROMPT": "system", "AVAILABLE_TOOLS": "system",
    "tools": "system", "available_tools": "system", "tool_declare": "system", "ipython": "tool", "observation": "tool",
    "function": "tool", "functions": "tool", "im_system": "tool", "tool_response": "tool",
    "tool▁output▁begin": "tool", "TOOL_RESULTS": "tool", "tool▁output▁end": "assistant", "/TOOL_RESULTS": "assistant",
}  # fmt: skip
"""Names in marks that are no roles. Where nothing marks the reply after a tool's answer, the answer's end does."""
_TOOLS_ANSWER = re.compile(r"\s*<tool_response>")
_END_MARK = (
    r"(?:<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|end|return|call)\|>|<end_of_turn>|</s>|\[e~\[|"
    r"<｜(?:end▁of▁sentence|tool▁output▁end)｜>|\[/(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)\])"
)
_END = re.compile(_END_MARK + r"\s*$")
_ANY_END = re.compile(_END_MARK)
_FIRST_TOKEN = re.compile(r"<[^>]*>|\[[^\]]*\]|\]~b\]")


class Stretch(NamedTuple):
    """A turn as places in the text: where its mark begins, where its own text does, and where that ends."""

    role: str
    start: int
    body: int
    end: int


def stretches(text: str) -> Iterator[Stretch]:
    """The turns of a text, in order; what stands before the first mark is "text". None without a mark."""
    found = list(_HEADER.finditer(text))
    if found and found[0].start():
        yield Stretch("text", 0, 0, found[0].start())
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends):
        role = _role(match)
        if role == "user" and _TOOLS_ANSWER.match(text, match.end(), end):
            role = "tool"
        yield Stretch(role, match.start(), match.end(), end)


def mark_of(text: str, stretch: Stretch) -> str:
    """The first special token of a turn's mark, such as `<|im_start|>`."""
    found = _FIRST_TOKEN.match(text, stretch.start, stretch.body)
    return found[0] if found else ""


def without_end(text: str) -> str:
    """A turn's text without the blanks around it and the mark that ends it."""
    return _END.sub("", text).strip()


def readable(text: str) -> str:
    """A piece of a rendered conversation with names of roles in place of marks."""
    named = _HEADER.sub(lambda match: _role(match) + ": ", text)
    return _ANY_END.sub(" ", named)


def _role(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group)
    return _ROLES.get(name, name)
