"""Whether the files of a model directory are complete; reads their headers. The usual fault is an aborted download."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.files import read_json
from stretto.chat.templates import read_templates
from stretto.doctor.finding import Finding, bad, good, note
from stretto.doctor.machine import gib

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD = struct.Struct("<Q")
_MAX_HEADER = 100 << 20


def check_files(name: str, directory: Path) -> Iterator[Finding]:
    """A finding about the weights of a model, and one about its chat template if it has none."""
    title = f"model {name}"
    try:
        sizes = {file: read_size(directory / file)[0] for file in weight_files(directory)}
    except DataError as error:
        fix = f"delete that file and fetch the model again: hf download {name} (or copy it whole)"
        yield bad(title, str(error), fix)
        return
    text = f"{directory}: {len(sizes)} file{'s' * (len(sizes) != 1)} of weights, {gib(sum(sizes.values()))}, all whole"
    yield good(title, text)
    templates = read_templates(directory, read_json(directory / "tokenizer_config.json"))
    if (directory / "tokenizer.json").is_file() and not templates:
        text = "has a tokenizer and no chat template of its own: [renderer] decides how messages are written"
        yield note(title, text)


def weight_files(directory: Path) -> list[str]:
    """The files of weights that the directory's index names; without an index, all that it has.

    Raises: DataError if there are none, or the index is damaged.
    """
    index = directory / INDEX
    if not index.is_file():
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            raise DataError(f"{directory}: no {SINGLE}, and no {INDEX}: there are no weights")
        return names
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{index}: damaged ({type(error).__name__})") from error


def num_parameters(directory: Path) -> int:
    """Parameters in the files of weights.

    Raises: DataError for a damaged file.
    """
    return sum(read_size(directory / file)[1] for file in weight_files(directory))


def read_size(file: Path) -> tuple[int, int]:
    """Bytes of a complete file of weights, and parameters in it.

    Raises: DataError that says what is wrong with the file.
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
