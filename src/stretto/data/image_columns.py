"""The images of a record: its column `images` (or `image`), and where its messages show them.

A message shows the next image of the column where its text has `<image>`, or where its content has a part
{"type": "image"} without a source. Other image parts have a source of their own. Relative paths begin in the folder of
the record's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.base.errors import DataError
from stretto.data.pictures import SOURCE_KEYS, Message, Part, check_picture, image_parts, is_image, is_path, source_of

IMAGE_KEYS = ("images", "image")
MARK = "<image>"


def column_of(record: dict[str, Any]) -> dict[str, Any]:
    """The columns of a record that have its images."""
    return {key: record[key] for key in IMAGE_KEYS if record.get(key) is not None}


def with_images(messages: list[Message], record: dict[str, Any], where: str) -> list[Message]:
    """The messages, with every image as {"type": "image", "image": source} and a source that can be opened.

    Raises: DataError if the record has more or fewer images than its messages show, or one cannot be read.
    """
    column: list[Any] = []
    for value in column_of(record).values():
        column += value if isinstance(value, list | tuple) else [value]
    marked = [_split_marks(message) if column else message for message in messages]
    num_shown = sum(_has_no_source(part) for message in marked for part in _parts(message))
    if num_shown != len(column):
        raise DataError(
            f"{where}: {len(column)} images, and the messages show {num_shown}; write {MARK} in a text, or a part "
            '{"type": "image"}, where each is shown.'
        )
    images = iter(column)
    completed = [_with_sources(message, images, where) for message in marked]
    for part, place in image_parts(completed):
        check_picture(part["image"], f"{where}: {place}")
    return completed


def _with_sources(message: Message, images: Iterator[Any], where: str) -> Message:
    if not any(map(is_image, _parts(message))):
        return message
    return message | {"content": [_with_source(part, images, where) for part in _parts(message)]}


def _with_source(part: Any, images: Iterator[Any], where: str) -> Any:
    """An image part with its source under the key `image`, as an absolute path if it is one."""
    if not is_image(part):
        return part
    source = source_of({"image": next(images)} if _has_no_source(part) else part, where)
    if is_path(source) and not str(source).startswith(("http://", "https://")):
        folder = getattr(where, "folder", Path())
        source = str((folder / str(source).removeprefix("file://")).absolute())
    return {"type": "image", "image": source}


def _has_no_source(part: Any) -> bool:
    """Whether this part shows the next image of the column."""
    return is_image(part) and all(part.get(key) is None for key in SOURCE_KEYS)


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _split_marks(message: Message) -> Message:
    """The message; if its text has marks, its content is split into parts."""
    content = message.get("content")
    if not isinstance(content, str) or MARK not in content:
        return message
    parts: list[Part] = []
    for i, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return message | {"content": parts}
