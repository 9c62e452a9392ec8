"""The files of weights of a model directory, by their headers: names, shapes and sizes; and rows of the embedding.

A header says the name, dtype, shape and place of every tensor of its file. The usual faults of files are an aborted
download, a copy without some shards, and links of Git LFS in place of the files.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import DataError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD = struct.Struct("<Q")
_MAX_HEADER = 100 << 20
_POINTER = b"version https://git-lfs"
_NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NUM_REFERENCE_ROWS = 512


class NoWeightsError(DataError):
    """A directory has no weights of any kind."""


@dataclass(frozen=True)
class HeaderTensor:
    """One tensor of a file of weights."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the file."""
    num_bytes: int


@dataclass(frozen=True)
class WeightFile:
    """A complete file of weights."""

    num_bytes: int
    tensors: dict[str, HeaderTensor]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def find_weight_files(directory: Path) -> list[str]:
    """The files of weights that the directory's index names; without an index, all that it has.

    Raises: NoWeightsError if there are none, DataError if the index is damaged or they are of another kind.
    """
    index = directory / INDEX
    if not index.is_file():
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            others = _others(directory)
            what = f"{directory}: no {SINGLE}, and no {INDEX}: there are no weights{others}"
            raise DataError(what) if others else NoWeightsError(what)
        return names
    return sorted(set(_read_index(index).values()))


def read_weight_files(directory: Path) -> dict[str, WeightFile]:
    """The headers of all files of weights, by the files' names.

    Raises: DataError that says what is wrong with a file, or which tensors of the index are in none.
    """
    files = {name: read_weight_file(directory / name) for name in find_weight_files(directory)}
    index = directory / INDEX
    if index.is_file():
        for tensor, name in _read_index(index).items():
            if tensor not in files[name].tensors:
                raise DataError(f"{index}: says that {name} has the tensor {tensor!r}, which it has not")
    return files


def read_weight_file(file: Path) -> WeightFile:
    """The header of one file of weights, which is complete.

    Raises: DataError that says what is wrong with the file.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD.size)
            size = file.stat().st_size
            _check_head(file, head + opened.read(len(_POINTER) - _HEAD.size), size)
            (length,) = _HEAD.unpack(head)
            if length > min(size - _HEAD.size, _MAX_HEADER):
                raise DataError(f"{file}: damaged: its header is said to have {length} bytes, the file has {size}")
            opened.seek(_HEAD.size)
            header = json.loads(opened.read(length))
        begin = _HEAD.size + length
        tensors = {name: _tensor(file, entry, begin) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError as error:
        raise DataError(f"{file}: missing, and the index names it") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file}: damaged or no safetensors file ({type(error).__name__}: {error})") from error
    expected = max((each.offset + each.num_bytes for each in tensors.values()), default=begin)
    if size != expected:
        raise DataError(f"{file}: has {size} bytes, its header says {expected}: a download or copy that broke off")
    return WeightFile(size, tensors)


def find_embedding(tensors: Mapping[str, HeaderTensor]) -> HeaderTensor | None:
    """The table of token embeddings among the tensors of a model."""
    is_embedding = lambda name: name.endswith(("embed_tokens.weight", "embeddings.weight"))
    return next((tensor for name, tensor in tensors.items() if is_embedding(name)), None)


def untrained_rows(directory: Path, token_ids: Sequence[int]) -> list[int]:
    """Those of the tokens whose rows in the embedding look as if no training had moved them.

    Such a row is less than a third as long as the median of others, or the same in every bit as that of another token.
    Raises: DataError for damaged files.
    """
    files = read_weight_files(directory).values()
    embedding = find_embedding({name: t for file in files for name, t in file.tensors.items()})
    if embedding is None or embedding.dtype not in _NUMPY_DTYPES or len(embedding.shape) != 2:
        return []
    num_rows = embedding.shape[0]
    others = range(0, num_rows, max(1, num_rows // _NUM_REFERENCE_ROWS))
    lengths = [float(np.linalg.norm(row)) for row in _rows(embedding, others).values()]
    found = _rows(embedding, sorted({token for token in token_ids if token < num_rows}))
    copies = Counter(row.tobytes() for row in found.values())
    shortest = float(np.median(lengths)) / 3
    return [t for t, row in found.items() if np.linalg.norm(row) < shortest or copies[row.tobytes()] > 1]


def _rows(tensor: HeaderTensor, indices: Iterable[int]) -> dict[int, np.ndarray]:
    """Rows of a matrix, float32."""
    size = tensor.num_bytes // tensor.shape[0]
    rows = {}
    with tensor.file.open("rb") as opened:
        for index in indices:
            opened.seek(tensor.offset + index * size)
            row = np.frombuffer(opened.read(size), _NUMPY_DTYPES[tensor.dtype])
            is_bfloat16 = tensor.dtype == "BF16"
            rows[index] = (row.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else row.astype(np.float32)
    return rows


def _check_head(file: Path, head: bytes, size: int) -> None:
    """Raises: DataError for an empty file, and for a link of Git LFS."""
    if not size:
        raise DataError(f"{file}: damaged: is empty (0 bytes), a download or copy that broke off")
    if head.startswith(_POINTER):
        raise DataError(f"{file}: is a link of Git LFS, not the weights: run `git lfs pull` in that directory")
    if size < _HEAD.size:
        raise DataError(f"{file}: damaged: has {size} bytes, which is no safetensors file")


def _tensor(file: Path, entry: dict[str, Any], begin: int) -> HeaderTensor:
    low, high = map(int, entry["data_offsets"])
    return HeaderTensor(file, str(entry["dtype"]), tuple(map(int, entry["shape"])), begin + low, high - low)


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises: DataError for a damaged index."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        if not found or not all(isinstance(name, str) for name in found.values()):
            raise ValueError("it names no files")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{index}: damaged ({type(error).__name__})") from error
    return dict(found)


def _others(directory: Path) -> str:
    """What is there in place of safetensors, and what to do with it."""
    if names := sorted(path.name for path in directory.glob("*.gguf")):
        return (
            f", but {names[0]}, and a GGUF file can neither be trained nor served here; give the model's directory of "
            "safetensors files, from which the GGUF file was made"
        )
    if names := sorted(path.name for path in directory.glob("*.bin")):
        return (
            f", but {names[0]}, a pickle of torch; save them as safetensors: transformers' "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return ""
