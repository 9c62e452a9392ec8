"""Saves and publishes a sharded policy: each checkpoint tensor is assembled on one rank.

A `TensorExchange` assigns each tensor of the checkpoint to a rank, to which the others send the slices they have of it.
A rank never holds more than its shard and the tensors of one round of exchanges. `save_weights`
appends tensors to a file per rank; `Publication` gives them to the rank's end of the weight broadcast. With LoRA, files
have the weights with the adapter added, and only the adapter is published. Adapters are small: all ranks gather them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.models import hub
from stretto.models.lora import Adapter, is_adapter_parameter, pair_names, peft_name
from stretto.models.safetensors_file import StreamWriter, TensorEntry
from stretto.models.tensor_map import Region, Shape, TensorSlice
from stretto.trainer.optim.build import MasterWeights, TrainedWeights
from stretto.trainer.parallel.collectives import group_by_size
from stretto.trainer.parallel.shard import ShardedWeights, local_tensor

_Place = tuple[Shape, Shape, Shape]
"""Start and size of a rank's slice of a parameter, and the shape of the whole."""
ROUND_BYTES = 1 << 27
"""The most bytes that a rank receives in one round of exchanges, unless a single tensor is larger."""


def gather_adapter(weights: ShardedWeights) -> Adapter:
    """The whole trained adapter by parameter names, on every rank; all ranks must call it."""
    pairs, rank, scaling = {}, 0, 0.0
    for name, a, b, own_scaling in pair_names(weights.policy):
        pairs[name] = _gather_parameter(a, weights), _gather_parameter(b, weights)
        rank, scaling = pairs[name][0].shape[-2], own_scaling
    return Adapter(pairs, rank, scaling)


def gather_peft_adapter(weights: TrainedWeights) -> Adapter:
    """The whole trained adapter by PEFT's names, on every rank; all ranks must call it."""
    if isinstance(weights, MasterWeights):
        return Adapter.of(weights.policy)
    assert isinstance(weights, ShardedWeights)
    adapter = gather_adapter(weights)
    return replace(adapter, pairs={peft_name(weights.policy, n): pair for n, pair in adapter.pairs.items()})


def _gather_parameter(name: str, weights: ShardedWeights) -> Tensor:
    """A whole parameter in the dtype of exports, on every rank; all ranks must call it."""
    tensor = weights.gather_tensor(name, local_tensor(weights.all_parameters[name].detach()))
    return tensor.to(export_dtype(name, weights))


def export_dtype(name: str, weights: TrainedWeights) -> torch.dtype:
    """The dtype in which a parameter is saved and published."""
    policy = weights.policy
    return policy.get_parameter(name).dtype if name in policy.unsharded_names else weights.export_dtype


# -- files --


@dataclass(frozen=True)
class _PlannedFile:
    """A file of the checkpoint, the rank that writes it, and its tensors."""

    rank: int
    entries: list[TensorEntry]


def save_weights(weights: TrainedWeights, directory: Path, names: Mapping[str, str]) -> None:
    """Write safetensors files and their index; all ranks must call it, each writes its own.

    names: the new names of renamed tensors.
    """
    mesh = weights.mesh
    files = _plan_files(weights)
    paths = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    mine = {entry.name: i for i, file in enumerate(files) if file.rank == mesh.rank for entry in file.entries}
    writers = {
        i: StreamWriter(directory / paths[i], [e.renamed(names.get(e.name, e.name)) for e in file.entries])
        for i, file in enumerate(files)
        if file.rank == mesh.rank
    }
    owned = [[e for f in files if f.rank == rank for e in f.entries] for rank in range(mesh.world_size)]
    for name, tensor in TensorExchange(ShardIndex(weights), owned).tensors(torch.device("cpu")):
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


def _plan_files(weights: TrainedWeights) -> list[_PlannedFile]:
    """Split the tensors, in their order, into files of about equal bytes per rank; the same plan on all ranks."""
    world, entries = weights.mesh.world_size, _entries(weights)
    total = max(sum(entry.num_bytes for entry in entries), 1)
    files: list[_PlannedFile] = []
    before, size = 0, 0
    for entry in entries:
        rank = min(before * world // total, world - 1)
        if not files or files[-1].rank != rank or size + entry.num_bytes > hub.MAX_SHARD_BYTES:
            files.append(_PlannedFile(rank, []))
            size = 0
        files[-1].entries.append(entry)
        before, size = before + entry.num_bytes, size + entry.num_bytes
    return files


def _entries(weights: TrainedWeights) -> list[TensorEntry]:
    """The tensors of the checkpoint, in their order there."""
    table = weights.policy.tensor_map
    return [
        TensorEntry(name, export_dtype(table.slices_of(name)[0].ours, weights), shape)
        for name, shape in table.their_shapes.items()
    ]


# -- versions for engines --


class Publication:
    """What this rank publishes of every version: the tensors that it owns.

    Each tensor has one owner rank, which assembles and sends it. Replicas (dp_replicate) beyond the first own nothing.
    All ranks must iterate over the tensors.
    """

    def __init__(self, weights: TrainedWeights) -> None:
        self._weights = weights
        self._exchange: TensorExchange | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank owns, by Hugging Face name, with the adapter added to them."""
        if isinstance(self._weights, MasterWeights):
            return hub.export_tensors(self._weights.policy)
        if self._exchange is None:
            index = ShardIndex(self._weights)
            self._exchange = TensorExchange(index, assign_owners(index))
        return self._exchange.tensors(self._weights.mesh.device)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter pairs that this rank owns, by PEFT's names.

        All ranks gather each pair, and only its owner keeps it.
        """
        if isinstance(self._weights, MasterWeights):
            yield from Adapter.of(self._weights.policy).tensors()
            return
        assert isinstance(self._weights, ShardedWeights), "adapters are of our own modules"
        mesh = self._weights.mesh
        owned_bytes = [0] * _num_owner_ranks(self._weights)
        for name, a, b, scaling in pair_names(self._weights.policy):
            pair = _gather_parameter(a, self._weights), _gather_parameter(b, self._weights)
            owner = owned_bytes.index(min(owned_bytes))
            owned_bytes[owner] += sum(half.nbytes for half in pair)
            if owner == mesh.rank:
                own_name = peft_name(self._weights.policy, name)
                yield from Adapter({own_name: pair}, pair[0].shape[-2], scaling).tensors()


def assign_owners(index: ShardIndex) -> list[list[TensorEntry]]:
    """The tensors that each rank owns: it has much of each, and bytes are balanced.

    An expert is owned by one of the ranks that have it (ep), so it leaves that rank only to be sent to engines.
    """
    weights = index.weights
    entries, num_owners = _entries(weights), _num_owner_ranks(weights)
    num_held = [sum(_num_elements(held.region) for held in index.held_slices(entry)) for entry in entries]
    counts = weights.mesh.gather(num_held, list[int])[:num_owners]
    owned: list[list[TensorEntry]] = [[] for _ in range(weights.mesh.world_size)]
    owned_bytes = [0] * num_owners
    for entry, by_rank in zip(entries, zip(*counts, strict=True), strict=True):
        # Half is enough: shards of one tensor may differ a little in size.
        candidates = [rank for rank, count in enumerate(by_rank) if 2 * count >= max(by_rank)]
        owner = min(candidates, key=lambda rank: owned_bytes[rank])
        owned_bytes[owner] += entry.num_bytes
        owned[owner].append(entry)
    return owned


def _num_owner_ranks(weights: TrainedWeights) -> int:
    """How many ranks own tensors: those of the first replica, which are the first ranks."""
    return weights.mesh.world_size // weights.mesh.degrees.dp_replicate


# -- the exchange --


@dataclass(frozen=True)
class _HeldSlice:
    """A slice of a checkpoint's tensor that one rank has."""

    entry: TensorEntry
    ours: str  # the parameter it lies in
    theirs: Region  # its place in the checkpoint's tensor
    region: Region  # its place in the rank's slice of the parameter

    @property
    def num_bytes(self) -> int:
        return _num_elements(self.region) * self.entry.dtype.itemsize


@dataclass(frozen=True)
class _ExchangeRound:
    """One round: the tensors that this rank assembles, what it has of them itself, what it sends and receives."""

    entries: list[TensorEntry]
    local: list[_HeldSlice]
    sent: list[list[_HeldSlice]]
    received: list[list[_HeldSlice]]


class ShardIndex:
    """Which ranks have which slices of the weights; all ranks must build it together."""

    def __init__(self, weights: TrainedWeights) -> None:
        self.weights = weights
        places = {
            name: (part.start, tuple(part.tensor.shape), part.shape) for name, part in weights.all_slices().items()
        }
        self._mine = {name: _without_data(*place) for name, place in places.items()}
        self._all: dict[str, dict[tuple[int, ...], tuple[TensorSlice, list[int]]]] = {}
        for rank, of_rank in enumerate(weights.mesh.gather(places, dict[str, _Place])):
            for name, place in of_rank.items():
                if (part := _without_data(*place)).tensor.numel():
                    self._all.setdefault(name, {}).setdefault(part.start, (part, []))[1].append(rank)

    def start(self, name: str) -> tuple[int, ...]:
        """Where this rank's slice of a parameter begins."""
        return self._mine[name].start

    def held_slices(self, entry: TensorEntry) -> Iterator[_HeldSlice]:
        """What this rank has of a checkpoint's tensor."""
        for shared in self.weights.policy.tensor_map.slices_of(entry.name):
            if (overlap := shared.overlap(self._mine[shared.ours])) is not None:
                yield _HeldSlice(entry, shared.ours, *overlap)

    def slices_to_send(self, entry: TensorEntry, owner: int) -> Iterator[_HeldSlice]:
        """What this rank sends of a tensor to its owner, or contributes if it is the owner itself."""
        me = self.weights.mesh.rank
        for held in self.held_slices(entry):
            if _find_sender(self._all[held.ours][self.start(held.ours)][1], owner) == me:
                yield held

    def slices_to_receive(self, entry: TensorEntry, owner: int) -> Iterator[tuple[int, _HeldSlice]]:
        """(sender, slice) for all that the owner gets of a tensor, in each sender's order."""
        for shared in self.weights.policy.tensor_map.slices_of(entry.name):
            for part, ranks in self._all[shared.ours].values():
                if (overlap := shared.overlap(part)) is not None:
                    yield _find_sender(ranks, owner), _HeldSlice(entry, shared.ours, *overlap)


def _without_data(start: Shape, size: Shape, shape: Shape) -> TensorSlice:
    return TensorSlice(torch.empty(size, device="meta"), start, shape)


def _find_sender(ranks: list[int], owner: int) -> int:
    """The rank that sends a slice: the tensor's owner if it has the slice, else the first that has it."""
    return owner if owner in ranks else ranks[0]


class TensorExchange:
    """Tensors of the checkpoint, each assembled on the rank that owns it.

    owned: the tensors of each rank; the same on all ranks. All ranks must iterate over `tensors`.
    """

    def __init__(self, index: ShardIndex, owned: Sequence[Sequence[TensorEntry]]) -> None:
        self._index, self._weights = index, index.weights
        mesh = index.weights.mesh
        lists = [list(group_by_size(entries, lambda e: e.num_bytes, ROUND_BYTES)) for entries in owned]
        self._rounds: list[_ExchangeRound] = []
        for number in range(max(map(len, lists))):
            by_owner = [each[number] if number < len(each) else [] for each in lists]
            sent = [[p for e in each for p in index.slices_to_send(e, owner)] for owner, each in enumerate(by_owner)]
            received: list[list[_HeldSlice]] = [[] for _ in by_owner]
            for entry in by_owner[mesh.rank]:
                for sender, held in index.slices_to_receive(entry, mesh.rank):
                    received[sender].append(held)
            local, sent[mesh.rank], received[mesh.rank] = received[mesh.rank], [], []
            self._rounds.append(_ExchangeRound(by_owner[mesh.rank], local, sent, received))

    @torch.no_grad()
    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors with their current values, in the order of `owned`."""
        parts = {name: part.tensor for name, part in self._weights.all_slices().items()}
        adapter = None
        if any(map(is_adapter_parameter, parts)):
            assert isinstance(self._weights, ShardedWeights), "adapters are of our own modules"
            adapter = gather_adapter(self._weights)
        for round_ in self._rounds:
            tensors = {e.name: torch.empty(e.shape, dtype=e.dtype, device=device) for e in round_.entries}
            for held in round_.local:
                tensors[held.entry.name][held.theirs].copy_(self._value(held, parts, adapter))
            buffer = self._exchange(round_, parts, adapter).to(device)
            offset = 0
            for held in chain.from_iterable(round_.received):
                target = tensors[held.entry.name][held.theirs]
                data = buffer[offset : offset + held.num_bytes]
                # A view as another type must begin at a multiple of its size.
                data = data.clone() if offset % held.entry.dtype.itemsize else data
                target.copy_(data.view(held.entry.dtype).view(target.shape))
                offset += held.num_bytes
            del buffer
            while tensors:
                name = next(iter(tensors))
                yield name, tensors.pop(name)

    def _exchange(self, round_: _ExchangeRound, parts: Mapping[str, Tensor], adapter: Adapter | None) -> Tensor:
        """Exchange the slices of a round; the bytes of all that this rank receives, in order."""
        device = self._weights.mesh.device
        out_sizes, sent_sizes = (
            [sum(held.num_bytes for held in of_rank) for of_rank in each] for each in (round_.received, round_.sent)
        )
        out, sent = (torch.empty(sum(each), dtype=torch.uint8, device=device) for each in (out_sizes, sent_sizes))
        offset = 0
        for held in chain.from_iterable(round_.sent):
            value = self._value(held, parts, adapter).to(held.entry.dtype).contiguous()
            sent[offset : offset + held.num_bytes] = value.view(-1).view(torch.uint8)
            offset += held.num_bytes
        dist.all_to_all_single(out, sent, out_sizes, sent_sizes)
        return out

    def _value(self, held: _HeldSlice, parts: Mapping[str, Tensor], adapter: Adapter | None) -> Tensor:
        """The values of a slice that this rank has, with the adapter added to them."""
        name, region = held.ours, held.region
        tensor = parts[name][region].view(tuple(r.stop - r.start for r in held.theirs))
        if adapter is not None and name in adapter.pairs:
            starts = self._index.start(name)
            whole = tuple(slice(r.start + s, r.stop + s) for r, s in zip(region, starts, strict=True))
            tensor = tensor.float() + adapter.delta(name, whole).to(tensor.device).view(tensor.shape)
        return tensor


def _num_elements(region: Region) -> int:
    return math.prod(part.stop - part.start for part in region)
