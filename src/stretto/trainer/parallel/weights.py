"""The weights of a sharded policy as checkpoints have them: dealt out to the ranks, or joined one at a time on all.

A `Deal` gives each rank some of the checkpoint's tensors: the others send it the rectangles they hold of them. No rank
holds more than its shard, what it does with its tensors, and one round of exchanges. `save_weights` appends them to a
file of each rank; `Publication` hands them to the rank's end of the weight broadcast. With LoRA files have the weights
with the adapter added, and the adapter alone is published. Who needs every tensor on every rank joins them (`Whole`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.models import hub
from stretto.models.lora import Adapter, added, is_adapter_parameter, own_name, pair_names
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
    return shards.all_parameters[name].dtype if name in shards.policy.kept_whole else shards.export_dtype


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
    owned = [[e for f in files if f.rank == rank for e in f.entries] for rank in range(mesh.world_size)]
    for name, tensor in Deal(Held(shards), owned).tensors(torch.device("cpu")):
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
    world, entries = shards.mesh.world_size, _entries(shards)
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


def _entries(shards: Shards) -> list[Entry]:
    """The tensors of the checkpoint, in its order."""
    table = shards.policy.tensor_map
    return [
        Entry(name, export_dtype(table.pieces_of(name)[0].ours, shards), shape)
        for name, shape in table.their_shapes.items()
    ]


# -- versions for engines --


class Publication:
    """What this rank publishes of every version: each tensor is one rank's, which joins it and sends it.

    Ranks that only repeat what others hold (dp_replicate) own nothing. Every rank must go through the tensors.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._deal: Deal | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights by Hugging Face name, with an adapter added to them."""
        if self._deal is None:
            held = Held(self._shards)
            self._deal = Deal(held, share_out(held))
        return self._deal.tensors(self._shards.mesh.device)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's pairs of the adapter by PEFT's names; a pair is joined by all, and let go by all but one."""
        mesh, whole = self._shards.mesh, Whole(self._shards)
        loads = [0] * _num_owners(self._shards)
        for name, a, b, scaling in pair_names(self._shards.policy):
            pair = whole.joined(a), whole.joined(b)
            owner = loads.index(min(loads))
            loads[owner] += sum(half.nbytes for half in pair)
            if owner == mesh.rank:
                own = own_name(self._shards.policy, name)
                yield from Adapter({own: pair}, pair[0].shape[-2], scaling).tensors()


def share_out(held: Held) -> list[list[Entry]]:
    """Of each rank the tensors that it owns: ones of which it holds much, about as many bytes as the others own.

    An expert is owned by one of the ranks that have it (ep) and does not leave it before it is sent to engines.
    """
    shards = held.shards
    entries, num_owners = _entries(shards), _num_owners(shards)
    mine = [sum(_num_elements(piece.region) for piece in held.here(entry)) for entry in entries]
    counts = shards.mesh.gather(mine)[:num_owners]
    owned: list[list[Entry]] = [[] for _ in range(shards.mesh.world_size)]
    loads = [0] * num_owners
    for entry, found in zip(entries, zip(*counts, strict=True), strict=True):
        # Shards of uneven sizes are much the same.
        able = [rank for rank, count in enumerate(found) if 2 * count >= max(found)]
        owner = min(able, key=lambda rank: loads[rank])
        loads[owner] += entry.num_bytes
        owned[owner].append(entry)
    return owned


def _num_owners(shards: Shards) -> int:
    """The first replica's ranks come first."""
    return shards.mesh.world_size // shards.mesh.degrees.dp_replicate


# -- the exchange --


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a checkpoint's tensor that one rank holds."""

    entry: Entry
    ours: str
    theirs: Region
    region: Region  # of the holder's part of ours

    @property
    def num_bytes(self) -> int:
        return _num_elements(self.region) * self.entry.dtype.itemsize


@dataclass(frozen=True)
class _Round:
    """One exchange: tensors, what this rank has of them itself, and what it sends to and gets from each other rank."""

    entries: list[Entry]
    own: list[_Piece]
    sent: list[list[_Piece]]
    received: list[list[_Piece]]


class Held:
    """Which rectangles of the weights which ranks have; every rank must make it."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._mine: dict[str, Local] = {}
        for name, parameter in shards.all_parameters.items():
            part = shards.part(name, local_part(parameter.detach()))
            self._mine[name] = _outline(part.start, part.tensor.shape)
        self._all: dict[str, dict[tuple[int, ...], tuple[Local, list[int]]]] = {}
        told = {name: (local.start, tuple(local.tensor.shape)) for name, local in self._mine.items()}
        for rank, rectangles in enumerate(shards.mesh.gather(told)):
            for name, (start, shape) in rectangles.items():
                if math.prod(shape):
                    rectangle = _outline(start, shape), []
                    self._all.setdefault(name, {}).setdefault(start, rectangle)[1].append(rank)

    def start(self, name: str) -> tuple[int, ...]:
        """Where this rank's rectangle begins."""
        return self._mine[name].start

    def here(self, entry: Entry) -> Iterator[_Piece]:
        """What this rank has of a tensor."""
        for piece in self.shards.policy.tensor_map.pieces_of(entry.name):
            if (overlap := piece.overlap(self._mine[piece.ours])) is not None:
                yield _Piece(entry, piece.ours, *overlap)

    def sent(self, entry: Entry, owner: int) -> Iterator[_Piece]:
        """What this rank sends of a tensor to the rank that owns it, or keeps as that rank."""
        me = self.shards.mesh.rank
        for piece in self.here(entry):
            if _sender(self._all[piece.ours][self.start(piece.ours)][1], owner) == me:
                yield piece

    def received(self, entry: Entry, owner: int) -> Iterator[tuple[int, _Piece]]:
        """(sender, what it sends) of a tensor; of each sender in the order in which it sends."""
        for piece in self.shards.policy.tensor_map.pieces_of(entry.name):
            for rectangle, ranks in self._all[piece.ours].values():
                if (overlap := piece.overlap(rectangle)) is not None:
                    yield _sender(ranks, owner), _Piece(entry, piece.ours, *overlap)


def _outline(start: Sequence[int], shape: Sequence[int]) -> Local:
    return Local(torch.empty(tuple(shape), device="meta"), tuple(start))


def _sender(ranks: list[int], owner: int) -> int:
    """Of several ranks that have a rectangle: the owner of what is made of it, or the first."""
    return owner if owner in ranks else ranks[0]


class Deal:
    """Tensors of the checkpoint, each put together on the rank that owns it.

    owned: of each rank its tensors; the same on all ranks. Every rank must go through `tensors`.
    """

    def __init__(self, held: Held, owned: Sequence[Sequence[Entry]]) -> None:
        self._held, self._shards = held, held.shards
        mesh, lists = held.shards.mesh, [_rounds(entries) for entries in owned]
        self._deal = []
        for number in range(max(map(len, lists))):
            wanted = [each[number] if number < len(each) else [] for each in lists]
            sent = [[p for e in each for p in held.sent(e, owner)] for owner, each in enumerate(wanted)]
            received: list[list[_Piece]] = [[] for _ in wanted]
            for entry in wanted[mesh.rank]:
                for sender, piece in held.received(entry, mesh.rank):
                    received[sender].append(piece)
            own, sent[mesh.rank], received[mesh.rank] = received[mesh.rank], [], []
            self._deal.append(_Round(wanted[mesh.rank], own, sent, received))

    @torch.no_grad()
    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors as they are now, in the order in which it owns them."""
        parts = {name: local_part(p.detach()) for name, p in self._shards.all_parameters.items()}
        adapter = whole_adapter(self._shards) if any(map(is_adapter_parameter, parts)) else None
        for turn in self._deal:
            tensors = {e.name: torch.empty(e.shape, dtype=e.dtype, device=device) for e in turn.entries}
            for piece in turn.own:
                tensors[piece.entry.name][piece.theirs].copy_(self._value(piece, parts, adapter))
            buffer = self._exchange(turn, parts, adapter).to(device)
            offset = 0
            for piece in chain.from_iterable(turn.received):
                target = tensors[piece.entry.name][piece.theirs]
                data = buffer[offset : offset + piece.num_bytes]
                # A view as another type must begin at a multiple of its size.
                data = data.clone() if offset % piece.entry.dtype.itemsize else data
                target.copy_(data.view(piece.entry.dtype).view(target.shape))
                offset += piece.num_bytes
            del buffer
            while tensors:
                name = next(iter(tensors))
                yield name, tensors.pop(name)

    def _exchange(self, turn: _Round, parts: Mapping[str, Tensor], adapter: Adapter | None) -> Tensor:
        """The bytes of all pieces that this rank gets, one after the other."""
        device = self._shards.mesh.device
        sizes = [[sum(piece.num_bytes for piece in of) for of in each] for each in (turn.received, turn.sent)]
        out, sent = (torch.empty(sum(each), dtype=torch.uint8, device=device) for each in sizes)
        offset = 0
        for piece in chain.from_iterable(turn.sent):
            value = self._value(piece, parts, adapter).to(piece.entry.dtype).contiguous()
            sent[offset : offset + piece.num_bytes] = value.view(-1).view(torch.uint8)
            offset += piece.num_bytes
        dist.all_to_all_single(out, sent, *sizes)
        return out

    def _value(self, piece: _Piece, parts: Mapping[str, Tensor], adapter: Adapter | None) -> Tensor:
        """What this rank has of a tensor."""
        name, region = piece.ours, piece.region
        tensor = parts[name][region].view(tuple(r.stop - r.start for r in piece.theirs))
        if adapter is not None and name in adapter.pairs:
            starts = self._held.start(name)
            whole = tuple(slice(r.start + s, r.stop + s) for r, s in zip(region, starts, strict=True))
            tensor = tensor.float() + adapter.delta(name, whole).to(tensor.device).view(tensor.shape)
        return tensor


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


def _num_elements(region: Region) -> int:
    return math.prod(part.stop - part.start for part in region)
