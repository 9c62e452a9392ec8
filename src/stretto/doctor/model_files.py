"""Whether the files of a model directory are whole: a download that broke off is the usual fault; reads headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

from stretto.base.errors import DataError
from stretto.doctor.finding import Finding, State
from stretto.doctor.machine import gib

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD = struct.Struct("<Q")
_MAX_HEADER = 100 << 20


def check_files(name: str, directory: Path) -> Iterator[Finding]:
    """A line about the weights of a model, and one about its tokenizer and chat template."""
    title = f"model {name}"
    try:
        sizes = {file: whole_size(directory / file)[0] for file in weight_files(directory)}
    except DataError as error:
        fix = f"delete that file and fetch the model again: hf download {name} (or copy it whole)"
        yield Finding(title, State.BAD, str(error), fix)
        return
    text = f"{directory}: {len(sizes)} file{'s' * (len(sizes) != 1)} of weights, {gib(sum(sizes.values()))}, all whole"
    yield Finding(title, State.GOOD, text)
    has_template = (directory / "chat_template.jinja").is_file() or _has_template(directory)
    if (directory / "tokenizer.json").is_file() and not has_template:
        text = "has a tokenizer and no chat template of its own: [renderer] decides how messages are written"
        yield Finding(title, State.NOTE, text)


def weight_files(directory: Path) -> list[str]:
    """The files of weights that the directory's index names.

    Raises: DataError if there are none, or the index is damaged.
    """
    index = directory / INDEX
    if not index.is_file():
        found = sorted(path.name for path in directory.glob("*.safetensors"))
        if not found:
            raise DataError(f"{directory}: no {SINGLE}, and no {INDEX}: there are no weights")
        return found
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{index}: damaged ({type(error).__name__})") from error


def num_parameters(directory: Path) -> int:
    """Numbers in the files of weights.

    Raises: DataError for a damaged file.
    """
    return sum(whole_size(directory / file)[1] for file in weight_files(directory))


def whole_size(file: Path) -> tuple[int, int]:
    """Bytes and numbers in a file of weights that is as long as its header says.

    Raises: DataError that says what is wrong with it.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD.size)
            size = file.stat().st_size
            (length,) = _HEAD.unpack(head)
            if length > min(size, _MAX_HEADER):
                raise DataError(
                    f"{file}: damaged: its header is said to have {length} bytes, the file has {size}"
                )
            header = json.loads(opened.read(length))
    except FileNotFoundError as error:
        raise DataError(f"{file}: missing, and the index names it") from error
    except (OSError, ValueError, struct.error) as error:
        raise DataError(
            f"{file}: damaged or no safetensors file ({type(error).__name__}: {error})"
        ) from error
    tensors = [each for key, each in header.items() if key != "__metadata__"]
    expected = _HEAD.size + length + max((each["data_offsets"][1] for each in tensors), default=0)
    if size != expected:
        raise DataError(
            f"{file}: has {size} bytes, its header says {expected}: a download or copy that broke off"
        )
    return size, sum(math.prod(each["shape"]) for each in tensors)


def _has_template(directory: Path) -> bool:
    try:
        return "chat_template" in json.loads((directory / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
