"""Parts of tensors in files, by torch.distributed.checkpoint: every rank writes what it has, and reads what it needs.

A rank's parts go into files of its own and an index names every rectangle, so that another mesh finds its own
rectangles among them. What several ranks hold alike is written once. Nothing is gathered on one rank. Which
directory this is, and when it counts, is checkpoint.py's business.
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
from stretto.trainer.state import Described, Part

INDEX = ".metadata"


class _SavePlanner(DefaultSavePlanner):
    """Offers each part as one rectangle; equal ones of several ranks are written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_written(name, p) for name, p in self.state_dict.items() if p.tensor.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def _written(name: str, part: Part) -> WriteItem:
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
    """Reads of every saved rectangle what overlaps a part of this rank's."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.parts: dict[str, Part] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, part in self.parts.items():
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
        tensor = self.parts[read_item.dest_index.fqn].tensor
        for dim, (low, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            tensor = tensor.narrow(dim, low, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def write(parts: dict[str, Part], directory: Path, group: Any = None) -> None:
    """Write this rank's parts and, on rank 0, the index; flushed to the disk.

    group: a gloo group of all ranks, of which each must call this; None: there is one rank.
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


class PartFiles:
    """What `write` wrote, ready to be read by any mesh."""

    def __init__(self, directory: Path) -> None:
        """Raises: DataError when the index cannot be read."""
        self._directory = directory
        self._reader = dcp.FileSystemReader(directory)
        try:
            self._metadata = self._reader.read_metadata()
            self.tensors = {n: _described(md) for n, md in self._metadata.state_dict_metadata.items()}
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, LookupError) as cause:
            raise DataError(
                f"{directory / INDEX}: cannot be read ({type(cause).__name__}: {cause})"
            ) from cause

    def read(self, targets: Mapping[str, Part]) -> None:
        """Fill these parts; every rank reads on its own.

        Raises: DataError when a tensor is missing, a file is damaged, or rectangles are.
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
            raise DataError(
                f"{self._directory}: its tensors cannot be read ({type(cause).__name__}: {_first_line(cause)})"
            ) from cause


def _described(metadata: TensorStorageMetadata) -> Described:
    return Described(tuple(metadata.size), metadata.properties.dtype)


def _check_covered(targets: Mapping[str, Part], plan: LoadPlan, where: Path) -> None:
    """Every element of every part is read once."""
    found = dict.fromkeys(targets, 0)
    for item in plan.items:
        found[item.dest_index.fqn] += torch.Size(item.lengths).numel()
    for name, part in targets.items():
        if found[name] != part.tensor.numel():
            raise DataError(f"{where}: holds {found[name]} of {part.tensor.numel()} elements of {name!r}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
