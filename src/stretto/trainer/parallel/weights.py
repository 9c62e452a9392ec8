"""The weights of a sharded policy as checkpoints have them: whole ones joined one at a time, or dealt out to files.

Whoever publishes needs every tensor on one rank, one after the other (`Whole`). Whoever writes a model directory
does not: `save_weights` gives each rank some of the checkpoint's tensors, the others send it the rectangles they
hold of them, and it appends them to a file of its own. No rank holds more than its shard and one round of
exchanges. With LoRA both add the adapter to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.models import hub
from stretto.models.lora import Adapter, added, is_adapter_parameter, pair_names
from stretto.models.safetensors_file import Entry, StreamWriter
from stretto.models.tensor_map import Local, Region

if TYPE_CHECKING:
    from stretto.trainer.parallel.shard import Shards

ROUND_BYTES = 1 << 27
"""What a rank gets in one round of exchanges, unless a single tensor is larger."""


class Whole(Mapping[str, Tensor]):
    """Whole weights by our names, joined when asked for, with their adapter added; the last one is kept.

    Every rank must ask for the same ones in the same order.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._last: tuple[str, Tensor] | None = None
        self._pairs = {name: rest for name, *rest in pair_names(shards.policy)}

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            tensor = self.joined(name)
            if name in self._pairs:
                a, b, scaling = self._pairs[name]
                tensor = added(tensor, self.joined(a), self.joined(b), scaling)
            self._last = name, tensor
        return self._last[1]

    def joined(self, name: str) -> Tensor:
        """A parameter as it is, adapters as well."""
        shards = self._shards
        tensor = shards.whole(name, local_part(shards.all_parameters[name].detach()))
        return tensor.to(export_dtype(name, shards))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._shards.all_parameters if not is_adapter_parameter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def whole_adapter(shards: Shards) -> Adapter:
    """The adapter that is trained, joined; every rank must ask, and gets it."""
    whole = Whole(shards)
    pairs, rank, scaling = {}, 0, 0.0
    for name, a, b, own_scaling in pair_names(shards.policy):
        pairs[name] = whole.joined(a), whole.joined(b)
        rank, scaling = pairs[name][0].shape[-2], own_scaling
    return Adapter(pairs, rank, scaling)


def export_dtype(name: str, shards: Shards) -> torch.dtype:
    return torch.float32 if name.endswith("expert_bias") else shards.export_dtype


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- files --


@dataclass(frozen=True)
class _File:
    """A file of the checkpoint, the rank that writes it, and what is in it."""

    rank: int
    entries: list[Entry]


def save_weights(shards: Shards, directory: Path, names: Mapping[str, str] | None = None) -> None:
    """Write safetensors files with an index into a directory; every rank must call it and writes its own.

    names: tensors that are called otherwise there.
    """
    names, mesh = names or {}, shards.mesh
    files = _plan_files(shards)
    paths = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    mine = {entry.name: i for i, file in enumerate(files) if file.rank == mesh.rank for entry in file.entries}
    writers = {
        i: StreamWriter(directory / paths[i], [e.called(names.get(e.name, e.name)) for e in file.entries])
        for i, file in enumerate(files)
        if file.rank == mesh.rank
    }
    for name, tensor in _dealt(shards, files):
        writers[mine[name]].add(tensor)
    for writer in writers.values():
        writer.close()
    if mesh.is_lead:
        total = sum(entry.num_bytes for file in files for entry in file.entries)
        hub.write_index(
            directory,
            {names.get(e.name, e.name): path for file, path in zip(files, paths) for e in file.entries},
            total,
        )


def _plan_files(shards: Shards) -> list[_File]:
    """Each rank gets tensors that follow each other, about as many bytes as the others; the same on all ranks."""
    table, world = shards.policy.tensor_map, shards.mesh.world_size
    entries = []
    for name, shape in table.their_shapes.items():
        dtype = export_dtype(table.pieces_of(name)[0].ours, shards)
        entries.append(Entry(name, dtype, shape))
    total = max(sum(entry.num_bytes for entry in entries), 1)
    files: list[_File] = []
    before, size = 0, 0
    for entry in entries:
        rank = min(before * world // total, world - 1)
        if not files or files[-1].rank != rank or size + entry.num_bytes > hub.MAX_SHARD_BYTES:
            files.append(_File(rank, []))
            size = 0
        files[-1].entries.append(entry)
        before, size = before + entry.num_bytes, size + entry.num_bytes
    return files


@torch.no_grad()
def _dealt(shards: Shards, files: Sequence[_File]) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors in the order of its files, put together from what all ranks hold of them."""
    mesh = shards.mesh
    holders = _holders(shards)
    parts = {name: local_part(p.detach()) for name, p in shards.all_parameters.items()}
    adapter = whole_adapter(shards) if any(map(is_adapter_parameter, parts)) else None
    rounds = [
        _rounds([e for file in files if file.rank == rank for e in file.entries])
        for rank in range(mesh.world_size)
    ]
    for number in range(max(map(len, rounds))):
        lists = [each[number] if number < len(each) else [] for each in rounds]
        sent = [
            torch.cat([torch.empty(0, dtype=torch.uint8, device=mesh.device), *pieces])
            for pieces in (_offered(shards, wanted, parts, holders, adapter) for wanted in lists)
        ]
        received, buffer = _exchange(shards, lists[mesh.rank], holders, sent)
        tensors = {e.name: torch.empty(e.shape, dtype=e.dtype) for e in lists[mesh.rank]}
        offset = 0
        for entry, region, shape in received:
            count = torch.Size(shape).numel() * entry.dtype.itemsize
            tensors[entry.name][region] = buffer[offset : offset + count].view(entry.dtype).view(shape)
            offset += count
        yield from tensors.items()


def _rounds(entries: list[Entry]) -> list[list[Entry]]:
    out: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not out or size + entry.num_bytes > ROUND_BYTES:
            out.append([])
            size = 0
        out[-1].append(entry)
        size += entry.num_bytes
    return out


Holders = list[dict[str, Local]]
"""Of each rank the rectangles it sends from: those that no rank before it has."""


def _holders(shards: Shards) -> Holders:
    mine = {}
    for name, parameter in shards.all_parameters.items():
        part = shards.part(name, local_part(parameter.detach()))
        mine[name] = part.start, tuple(part.tensor.shape)
    seen: set[tuple] = set()
    holders: Holders = []
    for rectangles in shards.mesh.gather(mine):
        holders.append({})
        for name, (start, shape) in rectangles.items():
            if (name, start) not in seen and torch.Size(shape).numel():
                seen.add((name, start))
                holders[-1][name] = Local(torch.empty(shape, device="meta"), start)
    return holders


def _overlaps(
    shards: Shards, wanted: Sequence[Entry], holder: Mapping[str, Local]
) -> Iterator[tuple[Entry, str, Region, Region]]:
    """What a rank has of these tensors: (tensor, our name, region of theirs, region of the rank's part)."""
    for entry in wanted:
        for piece in shards.policy.tensor_map.pieces_of(entry.name):
            if piece.ours in holder and (overlap := piece.overlap(holder[piece.ours])) is not None:
                yield entry, piece.ours, *overlap


def _offered(
    shards: Shards,
    wanted: Sequence[Entry],
    parts: Mapping[str, Tensor],
    holders: Holders,
    adapter: Adapter | None,
) -> Iterator[Tensor]:
    """This rank's bytes of these tensors."""
    mine = holders[shards.mesh.rank]
    for entry, name, _, region in _overlaps(shards, wanted, mine):
        tensor = parts[name][region].to(shards.mesh.device)
        if adapter is not None and name in adapter.pairs:
            whole = tuple(slice(r.start + s, r.stop + s) for r, s in zip(region, mine[name].start))
            tensor = tensor.float() + adapter.delta(name, whole).to(tensor.device)
        yield tensor.to(entry.dtype).contiguous().view(-1).view(torch.uint8)


def _exchange(
    shards: Shards, wanted: Sequence[Entry], holders: Holders, sent: list[Tensor]
) -> tuple[list[tuple[Entry, Region, tuple[int, ...]]], Tensor]:
    """Send each rank its bytes; where what comes back belongs, and its bytes in the same order."""
    received, sizes = [], []
    for holder in holders:
        size = 0
        for entry, _, theirs, _ in _overlaps(shards, wanted, holder):
            shape = tuple(r.stop - r.start for r in theirs)
            received.append((entry, theirs, shape))
            size += torch.Size(shape).numel() * entry.dtype.itemsize
        sizes.append(size)
    out = torch.empty(sum(sizes), dtype=torch.uint8, device=shards.mesh.device)
    dist.all_to_all_single(out, torch.cat(sent), sizes, [len(part) for part in sent])
    return received, out.cpu()
