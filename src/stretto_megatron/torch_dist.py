"""Reads and writes the `torch_dist` format of Megatron-Core: one distributed checkpoint of torch's per iteration.

A tensor is stored in chunks, of which only those are read that a slice needs. Where all layers are alike they are one
tensor with the layers as its first dim; else each has its number in its name.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from stretto.base.errors import DataError
from stretto.models.tensor_map import LazyTensor, Region, Shape
from stretto_megatron.names import ALIASES, LAYERS, extra_states, spellings
from stretto_megatron.places import METADATA
from stretto_megatron.torch_files import UNREADABLE, load_carefully

if TYPE_CHECKING:
    from jaxtyping import Shaped

_KEPT_CHUNKS = 2
"""Chunks in memory: the slices of one of our tensors often lie in one of theirs."""
_MAX_CHUNK_BYTES = 1 << 28
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?(?P<state>param|exp_avg|exp_avg_sq)\.(?P<name>.+)")
_COMMON, _COMMON_FILE = "common_state/shard_0_1", "common.pt"
_IGNORED = ("optimizer", "chained_", "rng_state", "common_state", "mtp.", "rerun_state")


class _TorchOnly(pickle.Unpickler):
    """Loads nothing that could run code of a file's choosing."""

    def find_class(self, module: str, name: str) -> Any:
        is_known = module.startswith("torch.distributed.checkpoint") or (module, name) in _KNOWN
        if not is_known or "." in name:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")
        return super().find_class(module, name)


_KNOWN = {
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("torch._C", "_get_layout"),
    ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset"), ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"), *(("torch", str(dtype).removeprefix("torch.")) for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    )),
}  # fmt: skip


@dataclass(frozen=True)
class _Stored:
    """One tensor, or one layer of a tensor of all layers."""

    files: TorchDist
    key: str
    lead: tuple[int, ...]
    shape: Shape
    dtype: torch.dtype

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        low = (*self.lead, *(part.indices(n)[0] for part, n in zip(region, self.shape, strict=True)))
        high = (*(i + 1 for i in self.lead), *(part.indices(n)[1] for part, n in zip(region, self.shape)))
        return self.files.read(self.key, low, high).squeeze(0) if self.lead else self.files.read(self.key, low, high)


class TorchDist:
    """The tensors of one iteration: weights, or what the optimizer has of each under the name of the weight."""

    def __init__(self, directory: Path, *, state: str | None = None) -> None:
        """state: of the optimizer, exp_avg, say; None: weights.

        Raises: DataError if the checkpoint's metadata cannot be read.
        """
        self.directory = directory
        path = directory / METADATA
        try:
            with path.open("rb") as file:
                self._metadata: Metadata = _TorchOnly(file).load()
            found = self._metadata.state_dict_metadata.items()
            self._tensors = {key: each for key, each in found if isinstance(each, TensorStorageMetadata)}
            self._objects = {key for key, each in found if not isinstance(each, TensorStorageMetadata)}
        except (OSError, pickle.UnpicklingError, AttributeError, EOFError, ValueError, TypeError, ImportError) as cause:
            raise DataError(f"{path}: cannot be read as a distributed checkpoint ({cause})") from None
        self._keys = {key: key for key in self._tensors}
        self.has_optimizer = any(_OPTIMIZER.match(key) for key in (*self._tensors, *self._objects))
        if state is not None:
            named = ((key, _STATE.match(key)) for key in self._tensors)
            self._keys = {match["name"]: key for key, match in named if match is not None and match["state"] == state}
            self._tensors = {name: self._tensors[key] for name, key in self._keys.items()}
        self._chunk = lru_cache(_KEPT_CHUNKS)(self._load_chunk)

    def names(self) -> Iterator[str]:
        """The names of all weights; one per layer of what is stored for all of them."""
        for key, each in self._tensors.items():
            if key.startswith(_IGNORED) or "_extra_state" in key:
                continue
            if key.startswith(LAYERS) and not key.removeprefix(LAYERS)[0].isdigit():
                yield from (f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}" for layer in range(each.size[0]))
            else:
                yield key

    def find(self, name: str) -> LazyTensor | None:
        """The tensor of this name, or of one that means the same; None if there is none."""
        first, layer, part = "", "", name
        if name.startswith(LAYERS):
            layer, part = name.removeprefix(LAYERS).split(".", 1)
            first = LAYERS
        for each in (part, *ALIASES.get(part, ())):
            if (found := self._tensors.get(f"{first}{layer}.{each}" if first else each)) is not None:
                return _Stored(self, f"{first}{layer}.{each}" if first else each, (), tuple(found.size), _dtype(found))
            if first and (found := self._tensors.get(f"{first}{each}")) is not None and int(layer) < found.size[0]:
                return _Stored(self, f"{first}{each}", (int(layer),), tuple(found.size[1:]), _dtype(found))
        return None

    def check_files(self) -> None:
        """Raises: DataError naming a file that is missing, or shorter than what is stored in it."""
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in sorted(ends.items()):
            path = self.directory / name
            if not path.is_file():
                raise DataError(f"{path}: this file of the checkpoint is missing; copy it anew")
            if (size := path.stat().st_size) < end:
                raise DataError(f"{path} has {size} bytes, and {end} are stored in it; copy it anew")

    def read(self, key: str, low: Shape, high: Shape) -> Shaped[Tensor, " ..."]:
        """The block [low, high) of a stored tensor."""
        stored = self._tensors[key]
        out = torch.empty([b - a for a, b in zip(low, high)], dtype=_dtype(stored))
        left = out.numel()
        for chunk in stored.chunks:
            start = [max(a, o) for a, o in zip(low, chunk.offsets)]
            stop = [min(b, o + n) for b, o, n in zip(high, chunk.offsets, chunk.sizes)]
            if any(a >= b for a, b in zip(start, stop)):
                continue
            theirs = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, chunk.offsets))
            ours = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, low))
            out[ours] = self._chunk(key, tuple(chunk.offsets))[theirs]
            left -= math.prod(b - a for a, b in zip(start, stop))
        if left:
            raise DataError(f"{self.directory}: {left} numbers of {key} are in none of its chunks")
        return out

    def _load_chunk(self, key: str, offsets: Shape) -> Tensor:
        path, stream = self._bytes_of(MetadataIndex(self._keys[key], torch.Size(offsets)))
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as cause:
            raise DataError(f"{path}: {key} cannot be read ({cause}); the file is truncated or damaged") from None

    def _bytes_of(self, index: MetadataIndex) -> tuple[Path, io.BytesIO]:
        """What is stored at a place, and its file."""
        place = self._metadata.storage_data[index]
        path = self.directory / place.relative_path
        if place.transform_descriptors:
            raise DataError(f"{path}: its tensors are compressed, which is not supported")
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                return path, io.BytesIO(file.read(place.length))
        except OSError as cause:
            raise DataError(f"{path}: cannot be read ({cause})") from None

    def common(self) -> Any:
        """What ranks have in common: step of the optimizer, iteration, schedule; objects of unknown kinds do nothing.

        Raises: DataError if it cannot be read.
        """
        path = self.directory / _COMMON_FILE
        try:
            if not path.exists():
                path, stream = self._bytes_of(MetadataIndex(_COMMON))
                (common,) = load_carefully(stream)
                return common
            return load_carefully(path)
        except (OSError, KeyError, *UNREADABLE) as cause:
            raise DataError(f"{path}: cannot be read ({cause!r}); it says how many steps were made") from None


def _dtype(stored: TensorStorageMetadata) -> torch.dtype:
    return stored.properties.dtype


# -- writing --


class _Planner(SavePlanner):
    """Gives each chunk when it is written, and keeps none."""

    def __init__(self, sources: dict[MetadataIndex, tuple[LazyTensor, Region]]) -> None:
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = write_item.tensor_data
        if data is None:
            return io.BytesIO(_NO_STATE)
        source, region = self._sources[write_item.index]
        return source[region].reshape(data.chunk.sizes).contiguous()

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...
    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


_NO_STATE = _saved([None])


def write_torch_dist(
    directory: Path, tensors: Iterable[tuple[str, Shape, LazyTensor]], *, is_stacked: bool, num_experts: int
) -> None:
    """Write tensors (name with the layer's number, shape, lazy tensor) as a checkpoint, one chunk after the other.

    is_stacked: all layers are alike, and each of their tensors is one with the layers as its first dim.
    """
    entries = [(each, shape, source) for name, shape, source in tensors for each in spellings(name)]
    names = [name for name, _, _ in entries]
    num_layers = 1 + max((int(name.split(".")[2]) for name in names if name.startswith(LAYERS)), default=-1)
    sources: dict[MetadataIndex, tuple[LazyTensor, Region]] = {}
    items: list[WriteItem] = []
    for name, shape, source in entries:
        key, lead = _stored_as(name) if is_stacked else (name, ())
        whole = torch.Size((*(num_layers for _ in lead), *shape))
        dtype = source[tuple(slice(0, 1) for _ in shape)].dtype
        for low, size in _chunks(shape, dtype):
            chunk = ChunkStorageMetadata(torch.Size((*lead, *low)), torch.Size((*(1 for _ in lead), *size)))
            index = MetadataIndex(key, chunk.offsets)
            sources[index] = source, tuple(slice(a, a + n) for a, n in zip(low, size))
            data = TensorWriteData(chunk, TensorProperties(dtype=dtype), whole)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    for name, num_parts in extra_states(names, num_experts):
        key, lead = _stored_as(name) if is_stacked else (name, ())
        for part in range(num_parts):
            place = [(i, num_layers) for i in lead] + ([(part, num_parts)] if num_parts > 1 or not lead else [])
            suffix = "_".join(".".join(map(str, numbers)) for numbers in zip(*place))
            index, size_of = MetadataIndex(f"{key}/shard_{suffix}"), BytesIOWriteData(len(_NO_STATE))
            items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=size_of))
    write_items(directory, items, sources)
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "args": Namespace()}, directory / "common.pt")
    kinds = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (directory / "metadata.json").write_text(json.dumps(kinds | {f"{key}_version": 1 for key in kinds}))


def write_items(
    directory: Path, items: list[WriteItem], sources: dict[MetadataIndex, tuple[LazyTensor, Region]]
) -> None:
    """Write the files of a distributed checkpoint, one chunk in memory at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    plans, metadata = create_default_global_save_plan([SavePlan(items)])
    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    writer.finish(metadata, [writer.write_data(plans[0], _Planner(sources)).wait()])


def chunk_items(
    name: str, shape: Shape, source: LazyTensor, dtype: torch.dtype
) -> Iterator[tuple[WriteItem, tuple[LazyTensor, Region]]]:
    """The chunks in which a tensor is written, each with what it is read from."""
    for low, size in _chunks(shape, dtype) if shape else [((), ())]:
        chunk = ChunkStorageMetadata(torch.Size(low), torch.Size(size))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
        item = WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        yield item, (source, tuple(slice(a, a + n) for a, n in zip(low, size)))


def _stored_as(name: str) -> tuple[str, tuple[int, ...]]:
    """The key of the tensor of all layers, and the layer's place in it; a tensor of no layer as it is."""
    if not name.startswith(LAYERS):
        return name, ()
    layer, part = name.removeprefix(LAYERS).split(".", 1)
    return LAYERS + part, (int(layer),)


def _chunks(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[Shape, Shape]]:
    """(start, size) of blocks of at most _MAX_CHUNK_BYTES, cut along the first dim."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    step = max(_MAX_CHUNK_BYTES // max(row_bytes, 1), 1)
    for low in range(0, shape[0], step):
        yield (low, *(0 for _ in shape[1:])), (min(step, shape[0] - low), *shape[1:])
