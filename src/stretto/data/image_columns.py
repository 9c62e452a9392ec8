"""The images of a record: its column `images` (or `image`), and where its messages show them.

A message shows the next image of the column where its text has `<image>`, or where its content has a part
{"type": "image"} that names no picture. Parts may name their pictures themselves. Relative paths begin in the folder of
the record's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.base.errors import DataError
from stretto.data.pictures import (
    SOURCE_KEYS,
    Message,
    Part,
    check_picture,
    image_parts,
    is_image,
    is_path,
    source_of,
)

IMAGE_KEYS = ("images", "image")
MARK = "<image>"


def column_of(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that has its images."""
    return {key: record[key] for key in IMAGE_KEYS if record.get(key) is not None}


def with_images(messages: list[Message], record: dict[str, Any], where: str) -> list[Message]:
    """The messages, each of whose images is {"type": "image", "image": source} with a source that can be opened.

    Raises: DataError if the record has more or fewer images than its messages show, or one cannot be read.
    """
    given = [image for value in column_of(record).values() for image in _listed(value)]
    marked = [_split_marks(message) if given else message for message in messages]
    num_shown = sum(_is_open(part) for message in marked for part in _parts(message))
    if num_shown != len(given):
        raise DataError(
            f"{where}: {len(given)} images, and the messages show {num_shown}; write {MARK} in a text, or a part "
            '{"type": "image"}, where each is shown.'
        )
    images = iter(given)
    shown = [_filled(message, images, where) for message in marked]
    for part, place in image_parts(shown):
        check_picture(part["image"], f"{where}: {place}")
    return shown


def _filled(message: Message, images: Iterator[Any], where: str) -> Message:
    if not any(map(is_image, _parts(message))):
        return message
    return message | {"content": [_named(part, images, where) for part in _parts(message)]}


def _named(part: Any, images: Iterator[Any], where: str) -> Any:
    """The part, with its source under the one key `image`; paths are absolute."""
    if not is_image(part):
        return part
    source = source_of({"image": next(images)} if _is_open(part) else part, where)
    if is_path(source) and not str(source).startswith(("http://", "https://")):
        folder = getattr(where, "folder", Path())
        source = str((folder / str(source).removeprefix("file://")).absolute())
    return {"type": "image", "image": source}


def _is_open(part: Any) -> bool:
    """Does this part show the next image of the column?"""
    return is_image(part) and all(part.get(key) is None for key in SOURCE_KEYS)


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _split_marks(message: Message) -> Message:
    """A message whose text has marks, with its content as parts."""
    content = message.get("content")
    if not isinstance(content, str) or MARK not in content:
        return message
    parts: list[Part] = []
    for i, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return message | {"content": parts}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
