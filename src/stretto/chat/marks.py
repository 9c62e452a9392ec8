"""Marks in messages, by which the text of each is found again in what a template makes of them.

A mark is two halves of surrogate pairs, which no text has: private-use characters are icons in some. Texts with marks
are only used to look, never encoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
_FIRST, _SECOND, _BASE = 0xDA00, 0xDC00, 0x400  # those below are the tokenizer's
_MARK = re.compile("[\uda00-\udbfd][\udc00-\udfff]")


def with_marks(messages: Sequence[Message], has_blanks: bool = False) -> list[Message]:
    """The messages with a mark before and behind each text, within the blanks around it unless has_blanks."""
    return [message | {"content": _marked(message.get("content"), i, has_blanks)} for i, message in enumerate(messages)]


def unmarked(text: str) -> tuple[str, list[tuple[int, int, int]]]:
    """A rendered text without its marks; message, start and stop in characters of each text between two."""
    kept: list[str] = []
    spans: list[tuple[int, int, int]] = []
    opened: dict[int, int] = {}
    length = 0
    start = 0
    for mark in _MARK.finditer(text):
        index = (ord(mark[0][0]) - _FIRST) * _BASE + ord(mark[0][1]) - _SECOND
        kept.append(text[start : mark.start()])
        length += mark.start() - start
        start = mark.end()
        if index in opened:
            spans.append((index, opened.pop(index), length))
        else:
            opened[index] = length
    kept.append(text[start:])
    return "".join(kept), spans


def owners_of(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, int]], text: str | None = None
) -> list[int]:
    """Per token the index of the span that it has a character of, the first one of several; -1 if none.

    text: what all of these are places in; of a token that goes beyond a span, blanks alone do not count.
    """
    ordered = sorted(spans, key=lambda span: span[1])
    owners, position = [], 0
    for left, right in offsets:
        while position < len(ordered) and ordered[position][2] <= left:
            position += 1
        owners.append(_owner_of(left, right, ordered, position, text))
    return owners


def _owner_of(left: int, right: int, spans: Sequence[tuple[int, int, int]], position: int, text: str | None) -> int:
    """The owner of a token; position: the first span that does not end before it."""
    while position < len(spans) and spans[position][1] < right:
        owner, start, stop = spans[position]
        is_within = start <= left and right <= stop
        if is_within or text is None or text[max(left, start) : min(right, stop)].strip():
            return owner
        position += 1
    return -1


def _marked(content: Any, index: int, has_blanks: bool) -> Any:
    if isinstance(content, list):
        return [
            part | {"text": _marked(part["text"], index, has_blanks)}
            if isinstance(part, dict) and "text" in part
            else part
            for part in content
        ]
    if not isinstance(content, str):
        return content
    if not (core := content if has_blanks else content.strip()):
        return content
    mark, at = chr(_FIRST + index // _BASE) + chr(_SECOND + index % _BASE), content.index(core)
    return content[:at] + mark + core + mark + content[at + len(core) :]
