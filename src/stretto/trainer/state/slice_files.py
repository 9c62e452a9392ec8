"""Saves and loads slices of tensors, each rank its own, with torch.distributed.checkpoint.

A rank's slices go into a file of its own and an index lists all slices, so that a rank of another mesh finds what it
needs. A slice that several ranks have is written once. Nothing is gathered on one rank. checkpoint.py decides the
directory and when it is complete.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from stretto.base.errors import DataError, EngineError
from stretto.models.tensor_map import Shape, TensorSlice
from stretto.trainer.ranks import exchange
from stretto.trainer.state.learner_state import TensorInfo

T = TypeVar("T")

INDEX = ".metadata"
_Item = tuple[str, Shape, Shape, Shape, str]
"""A slice to write: name, start, size, shape of the whole tensor, dtype."""
_Written = tuple[str, Shape, int, str, int, int]
"""A written slice: name, start, bytes; file, offset and length in it."""


class _SavePlanner(DefaultSavePlanner):
    """Plans one write per slice; a slice that several ranks have is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def _write_item(name: str, start: Shape, size: Shape, shape: Shape, dtype: str) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(start)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size)),
            properties=TensorProperties(dtype=getattr(torch, dtype)),
            size=torch.Size(shape),
        ),
    )


class _LoadPlanner(LoadPlanner):
    """Plans to read, from every saved slice, what overlaps with a slice of this rank."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.slices: dict[str, TensorSlice] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        assert self.metadata is not None
        for name, part in self.slices.items():
            if part.tensor.numel():
                saved = self.metadata.state_dict_metadata[name]
                assert isinstance(saved, TensorStorageMetadata), name
                chunk = ChunkStorageMetadata(torch.Size(part.start), part.tensor.shape)
                items += create_read_items_for_chunk_list(name, saved, [chunk])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("only tensors are written")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self.slices[read_item.dest_index.fqn].tensor
        for dim, (low, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            tensor = tensor.narrow(dim, low, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def write_slices(parts: dict[str, TensorSlice], directory: Path, group: Any = exchange.ALONE) -> None:
    """Write this rank's slices and, on rank 0, the index; flush them to the disk.

    group: a gloo group of all ranks, which must all call this. Plans are exchanged as numbers and names: torch's
    `dcp.save` would send pickles.

    Raises: on every rank an error if one rank could not write.
    """
    rank = exchange.find_rank(group)
    writer, planner = dcp.FileSystemWriter(directory, thread_count=1, sync_files=True), _SavePlanner()
    writer.reset(directory)
    planner.set_up_planner(parts, writer.storage_meta(), is_coordinator=rank == 0)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    items = [_item_of(name, part) for name, part in parts.items() if part.tensor.numel()]
    by_rank = exchange.gather(items, list[_Item], group)
    plans, metadata = planner.create_global_plan([SavePlan([_write_item(*i) for i in items]) for items in by_rank])
    plan = writer.prepare_global_plan([writer.prepare_local_plan(each) for each in plans])[rank]

    def write() -> list[_Written]:
        results = writer.write_data(planner.finish_plan(plan), planner)
        results.wait()
        return [_written_of(result) for result in results.value()]

    written = _call_on_all(write, list[_Written] | None, group)

    def finish() -> None:
        if rank == 0:
            writer.finish(metadata, [[_result_of(*each) for each in of_rank] for of_rank in written])

    _call_on_all(finish, None, group)


def _call_on_all(function: Callable[[], T], kind: Any, group: Any) -> list[T]:
    """Call a function on all ranks; its results on all of them. kind: their type, or None.

    Raises: this rank's error, or EngineError with that of another rank.
    """
    error: Exception | None = None
    try:
        result = function()
    except Exception as cause:  # the other ranks wait for an answer, whatever it is
        result, error = None, _failed_write(cause)
    answer = None if error is None else _reason(error), result
    answers: list[tuple[str | None, Any]] = exchange.gather(answer, tuple[str | None, kind], group)
    if error is not None:
        raise error
    for rank, (why, _) in enumerate(answers):
        if why is not None:
            raise EngineError(f"trainer rank {rank} could not write its part of the checkpoint: {why}")
    return [result for _, result in answers]


def _failed_write(error: Exception) -> Exception:
    """The system's error behind one of torch: its archive, closed after a write that failed, raises another over it."""
    under = error.__context__
    return under if isinstance(error, RuntimeError) and isinstance(under, OSError) else error


def _item_of(name: str, part: TensorSlice) -> _Item:
    return (name, part.start, tuple(part.tensor.shape), part.shape, str(part.tensor.dtype).removeprefix("torch."))


def _written_of(result: WriteResult) -> _Written:
    info = result.storage_data
    offset = tuple(result.index.offset or ())
    return result.index.fqn, offset, result.size_in_bytes, info.relative_path, info.offset, info.length


def _result_of(name: str, start: Shape, num_bytes: int, path: str, offset: int, length: int) -> WriteResult:
    return WriteResult(MetadataIndex(name, torch.Size(start)), num_bytes, _StorageInfo(path, offset, length))


class DamagedError(DataError):
    """The files of a checkpoint cannot be read: they are damaged."""


class SliceFiles:
    """The files that `write_slices` wrote, readable on any mesh."""

    def __init__(self, directory: Path) -> None:
        """Raises: DataError when the index cannot be read."""
        self._directory = directory
        self._reader = dcp.FileSystemReader(directory)
        try:
            self._metadata = self._reader.read_metadata()
            self.tensors = {n: _tensor_info(md) for n, md in self._metadata.state_dict_metadata.items()}
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, LookupError) as cause:
            raise DamagedError(f"{directory / INDEX}: cannot be read ({_reason(cause)})") from cause

    def read(self, targets: Mapping[str, TensorSlice]) -> None:
        """Fill these slices; every rank calls it on its own.

        Raises: DataError when a tensor or a part of one is missing, or a file is damaged.
        """
        if absent := sorted(set(targets) - set(self.tensors)):
            raise DataError(f"{self._directory}: has no tensor {absent[0]!r}")
        planner = _LoadPlanner()
        planner.set_up_planner(dict(targets), self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        _check_covered(targets, plan, self._directory)
        try:
            self._reader.read_data(plan, planner).wait()
        except (OSError, EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as cause:
            raise DamagedError(f"{self._directory}: its tensors cannot be read ({_reason(cause)})") from cause


def _tensor_info(metadata: TensorStorageMetadata | BytesStorageMetadata) -> TensorInfo:
    """Raises: ValueError for what is no tensor; `write_slices` writes nothing else."""
    if not isinstance(metadata, TensorStorageMetadata):
        raise ValueError(f"{type(metadata).__name__} is not of a tensor")
    return TensorInfo(tuple(metadata.size), metadata.properties.dtype)


def _check_covered(targets: Mapping[str, TensorSlice], plan: LoadPlan, where: Path) -> None:
    """Raises: DataError if the plan does not read every element of every target."""
    num_planned = dict.fromkeys(targets, 0)
    for item in plan.items:
        num_planned[item.dest_index.fqn] += torch.Size(item.lengths).numel()
    for name, part in targets.items():
        if num_planned[name] != part.tensor.numel():
            raise DataError(f"{where}: holds {num_planned[name]} of {part.tensor.numel()} elements of {name!r}")


def _reason(error: Exception) -> str:
    """The error in one line; for a pickle without torch's advice to trust the file."""
    if isinstance(error, pickle.UnpicklingError):
        return "its bytes are damaged"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
