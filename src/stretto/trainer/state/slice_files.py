"""Saves and loads slices of tensors, each rank its own, with torch.distributed.checkpoint.

A rank's slices go into a file of its own and an index lists all slices, so that a rank of another mesh finds what it
needs. A slice that several ranks have is written once. Nothing is gathered on one rank. checkpoint.py decides the
directory and when it is complete.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
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

from stretto.base.errors import DataError
from stretto.models.tensor_map import TensorSlice
from stretto.trainer.state.learner_state import TensorInfo

INDEX = ".metadata"


class _SavePlanner(DefaultSavePlanner):
    """Plans one write per slice; a slice that several ranks have is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [_write_item(name, p) for name, p in self.state_dict.items() if p.tensor.numel()]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def _write_item(name: str, part: TensorSlice) -> WriteItem:
    start = torch.Size(part.start)
    return WriteItem(
        index=MetadataIndex(name, start),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=part.tensor.shape),
            properties=TensorProperties.create_from_tensor(part.tensor),
            size=torch.Size(part.shape),
        ),
    )


class _LoadPlanner(LoadPlanner):
    """Plans to read, from every saved slice, what overlaps with a slice of this rank."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.slices: dict[str, TensorSlice] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, part in self.slices.items():
            if part.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(part.start), part.tensor.shape)
                items += create_read_items_for_chunk_list(
                    name, self.metadata.state_dict_metadata[name], [chunk]
                )
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


def write_slices(parts: dict[str, TensorSlice], directory: Path, group: Any = None) -> None:
    """Write this rank's slices and, on rank 0, the index; flush them to the disk.

    group: a gloo group of all ranks, which must all call this; None if there is one rank.
    """
    writer, planner = dcp.FileSystemWriter(directory, thread_count=1, sync_files=True), _SavePlanner()
    if group is not None:
        dcp.save(parts, storage_writer=writer, planner=planner, process_group=group)
        return
    writer.reset(directory)
    planner.set_up_planner(parts, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [writer.prepare_local_plan(planner.create_local_plan())]
    plans, metadata = planner.create_global_plan(plans)
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner)
    results.wait()
    writer.finish(metadata, [results.value()])


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


def _tensor_info(metadata: TensorStorageMetadata) -> TensorInfo:
    return TensorInfo(tuple(metadata.size), metadata.properties.dtype)


def _check_covered(targets: Mapping[str, TensorSlice], plan: LoadPlan, where: Path) -> None:
    """Raises: DataError if the plan does not read every element of every target."""
    found = dict.fromkeys(targets, 0)
    for item in plan.items:
        found[item.dest_index.fqn] += torch.Size(item.lengths).numel()
    for name, part in targets.items():
        if found[name] != part.tensor.numel():
            raise DataError(f"{where}: holds {found[name]} of {part.tensor.numel()} elements of {name!r}")


def _reason(error: Exception) -> str:
    """The error in one line; for a pickle without torch's advice to trust the file."""
    if isinstance(error, pickle.UnpicklingError):
        return "its bytes are damaged"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
