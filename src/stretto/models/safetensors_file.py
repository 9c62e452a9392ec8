"""Reads slices of tensors from safetensors files, and writes such files as a stream.

The safetensors library maps a whole file while it is open, so every page that was read counts as memory of this process
until the end, and loading peaks at twice the size of the model. Here each read maps one tensor, which is unmapped when
it has been copied into a parameter: the peak is the model and one tensor, and no memory is left over. The format: 8
bytes length, a JSON header with names, dtypes, shapes and offsets, then the bytes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.models.tensor_map import Region, Shape

if TYPE_CHECKING:
    from jaxtyping import Shaped

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file; indexing it with slices reads these slices."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    offset: int  # bytes from the beginning of the file

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        """A copy of the slice; nothing of the file stays mapped."""
        return self.peek(region).clone()

    def peek(self, region: Region) -> Shaped[Tensor, " ..."]:
        """The slice as pages of the file, unmapped when it is no longer in use; do not write to it."""
        return self.mapped()[region]

    def mapped(self) -> Shaped[Tensor, " ..."]:
        """The tensor without a copy, as pages of the file; do not write to it.

        All processes that map the file share its pages.
        """
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        mapped = np.memmap(self.path, np.uint8, mode="c", offset=self.offset, shape=(num_bytes,))
        return torch.from_numpy(mapped).view(self.dtype).view(self.shape)


def read_file(path: Path) -> Iterator[tuple[str, FileTensor]]:
    """Every tensor of a file by name, in the order of their bytes.

    Raises: DataError when the file is truncated or damaged, or has an unknown dtype.
    """
    header, begin, end = _header(path)
    try:
        tensors = [
            (name, _tensor(path, name, entry, begin, end)) for name, entry in header.items() if name != "__metadata__"
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise _damaged(path, f"its header is not a safetensors header: {cause!r}") from cause
    yield from sorted(tensors, key=lambda item: item[1].offset)


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def renamed(self, name: str) -> TensorEntry:
        return replace(self, name=name)


class StreamWriter:
    """Writes a file tensor by tensor, so that written tensors need not stay in memory."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        """entries: every tensor, in the order in which `add` will get them."""
        self._entries = iter(entries)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            ends = [offset, offset + entry.num_bytes]
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": ends}
            offset = ends[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: Shaped[Tensor, " ..."]) -> None:
        """Write the next tensor."""
        entry = next(self._entries)
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush the file to the disk; all tensors must have been written."""
        assert next(self._entries, None) is None, "a tensor is missing"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Close the file; after an error it is incomplete."""
        if error is None:
            self.close()
        else:
            self._file.close()


def _tensor(path: Path, name: str, entry: dict[str, Any], begin: int, end: int) -> FileTensor:
    if entry["dtype"] not in _DTYPES:
        raise DataError(f"{path}: tensor {name!r} is of dtype {entry['dtype']}, which is not supported")
    low, high = map(int, entry["data_offsets"])
    tensor = FileTensor(path, _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), begin + low)
    num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    if low < 0 or min(tensor.shape, default=0) < 0 or high - low != num_bytes or begin + high > end:
        raise _damaged(path, f"tensor {name!r} ends beyond the end or is not as long as its shape")
    return tensor


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, offset of the tensors' bytes, size of the file)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"its header of {length} bytes does not fit its {size} bytes")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as cause:
        raise _damaged(path, str(cause)) from cause
    return header, 8 + length, size


def _damaged(path: Path, cause: str) -> DataError:
    return DataError(f"{path}: cannot be read ({cause}); the file is truncated or damaged")
