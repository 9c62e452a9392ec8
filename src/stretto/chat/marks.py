"""Marks in messages, by which the text of each is found again in what a template makes of them.

A mark is a private-use character. Texts with marks are only used to look, never encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
_FIRST = 0xF1000  # plane 15 is for private use
_MOST = 0xE000


def with_marks(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark before and behind each text, within the blanks around it."""
    return [message | {"content": _marked(message.get("content"), i)} for i, message in enumerate(messages)]


def unmarked(text: str) -> tuple[str, list[tuple[int, int, int]]]:
    """A rendered text without its marks; message, start and stop in characters of each text between two."""
    kept: list[str] = []
    spans: list[tuple[int, int, int]] = []
    opened: dict[int, int] = {}
    length = 0
    start = 0
    for position, character in enumerate(text):
        index = ord(character) - _FIRST
        if not 0 <= index < _MOST:
            continue
        kept.append(text[start:position])
        length += position - start
        start = position + 1
        if index in opened:
            spans.append((index, opened.pop(index), length))
        else:
            opened[index] = length
    kept.append(text[start:])
    return "".join(kept), spans


def owners_of(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Per token the index of the span that it has a character of, -1 if none."""
    ordered = sorted(spans, key=lambda span: span[1])
    owners, position = [], 0
    for left, right in offsets:
        while position < len(ordered) and ordered[position][2] <= left:
            position += 1
        is_inside = position < len(ordered) and right > ordered[position][1]
        owners.append(ordered[position][0] if is_inside else -1)
    return owners


def _marked(content: Any, index: int) -> Any:
    if isinstance(content, list):
        return [
            part | {"text": _marked(part["text"], index)} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    if not isinstance(content, str) or not (core := content.strip()) or index >= _MOST:
        return content
    mark, at = chr(_FIRST + index), content.index(core)
    return content[:at] + mark + core + mark + content[at + len(core) :]
