"""Pictures in messages: the parts that show them, and how they are read.

A part has a source: a path, a data URL, bytes, {"bytes", "path"} as in data sets of Hugging Face, or a picture of
Pillow. Pillow is imported with the first picture.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.base.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IMAGE_TYPES = ("image", "image_url")
SOURCE_KEYS = ("image", "image_url", "bytes", "path", "url")
ROLES_WITH_IMAGES = ("user", "tool")

Message = dict[str, Any]
Part = dict[str, Any]


def image_parts(messages: Sequence[Message]) -> Iterator[tuple[Part, str]]:
    """The image parts of a conversation in order, each with its place for errors.

    Raises: DataError for an image in a message of a role that cannot show one.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for number, part in enumerate(content):
            if not is_image(part):
                continue
            where = f"messages[{index}].content[{number}]"
            if message.get("role") not in ROLES_WITH_IMAGES:
                raise DataError(
                    f"{where}: a message of the role {message.get('role')!r} has an image; chat templates take images "
                    f"in messages of {' and '.join(ROLES_WITH_IMAGES)}."
                )
            yield part, where


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGE_TYPES


def source_of(part: Part, where: str) -> Any:
    """The source of a part's picture: its `image`, OpenAI's `image_url`, `bytes`, `path` or `url`.

    Raises: DataError if it has none.
    """
    for key in SOURCE_KEYS:
        source = part.get(key)
        if isinstance(source, dict):  # OpenAI's {"url": ...}, or Hugging Face's {"bytes": ..., "path": ...}
            source = next((source[k] for k in ("url", "bytes", "path") if source.get(k) is not None), None)
        if source is not None:
            return source
    raise DataError(
        f"{where}: an image part has no picture; give it as `image` (a path, a data URL or bytes) or as "
        '`image_url` = {"url": ...}.'
    )


def read_picture(source: Any, where: str) -> Picture:
    """Read the picture of a source and turn it upright.

    Raises: DataError if it cannot be read.
    """
    from PIL import ImageOps

    if is_picture(source):
        return source
    with _open(source, where) as picture:
        try:
            picture.load()
            return ImageOps.exif_transpose(picture)
        except Exception as cause:  # decoders raise anything for damaged files
            raise DataError(f"{where}: the image cannot be read from {_name_of(source)}: {cause}") from cause


def check_picture(source: Any, where: str) -> None:
    """Check that a source has the header of a picture; its pixels are not decoded.

    Raises: DataError if it has none.
    """
    if not is_picture(source):
        _open(source, where).close()


def _open(source: Any, where: str) -> Picture:
    from PIL import Image as pillow

    file: Any = _path_of(source, where) if is_path(source) else io.BytesIO(_bytes_of(source, where))
    try:
        return pillow.open(file)
    except Exception as cause:  # decoders raise anything for damaged files
        reason = getattr(cause, "strerror", None) or str(cause)
        if isinstance(cause, pillow.UnidentifiedImageError):
            reason = "no image format that Pillow knows"
        raise DataError(f"{where}: the image cannot be read from {_name_of(source)}: {reason}") from cause


def identity_of(source: Any, where: str) -> bytes:
    """A hash of a picture without decoding it: of its file's path, time and size, or of its bytes.

    Raises: DataError if there is no such file, or the source is of another type.
    """
    digest = hashlib.blake2b(digest_size=16)
    if is_path(source):
        path = _path_of(source, where)
        try:
            state = path.stat()
        except OSError as cause:
            raise DataError(f"{where}: the image cannot be read from {path}: {cause.strerror}") from cause
        digest.update(f"{path.absolute()}\0{state.st_mtime_ns}\0{state.st_size}".encode())
    elif is_picture(source):
        digest.update(f"{source.mode}{source.size}".encode() + source.tobytes())
    else:
        digest.update(_bytes_of(source, where))
    return digest.digest()


def openai_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages in OpenAI's format, in which each image is a data URL.

    Raises: DataError for an image that cannot be read.
    """
    result = []
    for message in messages:
        if any(image_parts([message])):
            parts = [_openai_part(part) if is_image(part) else part for part in message["content"]]
            message = message | {"content": parts}
        result.append(message)
    return result


def _openai_part(part: Part) -> Part:
    source = source_of(part, "an image")
    if not isinstance(source, str) or is_path(source):
        source = data_url(_encoded(source))
    return {"type": "image_url", "image_url": {"url": source}}


def _encoded(source: Any) -> bytes:
    if is_picture(source):
        file = io.BytesIO()
        source.save(file, "png")
        return file.getvalue()
    check_picture(source, "an image")
    return _path_of(source, "an image").read_bytes() if is_path(source) else bytes(source)


def data_url(encoded: bytes) -> str:
    """A data URL of an encoded picture (JPEG or PNG)."""
    kind = "jpeg" if encoded[:2] == b"\xff\xd8" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


def is_picture(source: Any) -> bool:
    """Whether a source is a picture of Pillow."""
    return hasattr(source, "tobytes") and hasattr(source, "mode")


def is_path(source: Any) -> bool:
    """Whether a source is the path of a file."""
    return isinstance(source, Path) or (isinstance(source, str) and not source.startswith("data:"))


def _path_of(source: str | Path, where: str) -> Path:
    if str(source).startswith(("http://", "https://")):
        raise DataError(f"{where}: {str(source)!r} is not fetched; store the picture beside the data.")
    return Path(str(source).removeprefix("file://"))


def _name_of(source: Any) -> str:
    return str(source) if is_path(source) else "its data"


def _bytes_of(source: Any, where: str) -> bytes:
    """The encoded bytes of a data URL or of bytes.

    Raises: DataError if it is neither.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str):
        raise DataError(
            f"{where}: an image is a path, a data URL, bytes or a picture of Pillow, got {type(source).__name__}."
        )
    head, _, payload = source.partition(",")
    if not head.endswith(";base64"):
        raise DataError(f"{where}: the data URL {head[:40]!r} must be `data:image/...;base64,...`.")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise DataError(f"{where}: the data URL is not base64: {cause}") from cause
