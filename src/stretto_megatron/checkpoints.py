"""Checkpoints of Megatron-Core as tensors of Hugging Face's names, and the other way round.

Both sides are maps of slices of our parameters (`TensorMap`), so a tensor of one side is put together from the slices
that it shares with tensors of the other; nothing whole but that tensor is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.families.shape import ModelConfig
from stretto.models.tensor_map import LazyTensor, Region, Shape, SharedSlice, TensorMap, TensorSlice
from stretto_megatron.names import LAYERS, expert_order, megatron_map, spellings
from stretto_megatron.order import as_ours, as_theirs, swapped
from stretto_megatron.places import METADATA, find_iteration
from stretto_megatron.torch_dist import TorchDist
from stretto_megatron.torch_files import TorchFiles

if TYPE_CHECKING:
    from jaxtyping import Shaped

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron pads the vocabulary: their rows beyond that of the model are left out."""

Named = tuple[str, Shape, LazyTensor]


def read_megatron(directory: Path, cfg: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
    """Every tensor of an iteration by Megatron's name, lazily, checked against what the model must have.

    Raises: DataError naming what is missing, unknown or of a wrong shape.
    """
    place = find_iteration(directory)
    files = TorchDist(place) if (place / METADATA).exists() else TorchFiles(place)
    return named_tensors(files, place, cfg, megatron_map(cfg, str(directory)).their_shapes)


def named_tensors(
    files: TorchDist | TorchFiles, place: Path, cfg: ModelConfig, expected: Mapping[str, Shape]
) -> Iterator[tuple[str, LazyTensor]]:
    """The expected tensors of files, in our order; errors as those of `read_megatron`."""
    missing = []
    for name, our_shape in expected.items():
        is_swapped, is_in_turn = expert_order(cfg, name)
        shape = swapped(our_shape) if is_swapped else our_shape
        if (found := files.find(name)) is None:
            missing.append(name)
            continue
        has = tuple(found.shape)  # type: ignore[attr-defined]  # both kinds of lazy tensors have one
        if name in _PADDED and has[1:] == shape[1:] and has[0] > shape[0]:
            found = _Cut(found, has)
        elif has != shape:
            raise DataError(f"{place}: {name} has shape {has}, config.json asks for {shape}")
        yield name, as_ours(found, shape, is_swapped=is_swapped, is_in_turn=is_in_turn)
    if missing:
        raise DataError(f"{place}: {len(missing)} of {len(expected)} tensors are missing: {', '.join(missing[:4])} ...")
    known = {each for name in expected for each in spellings(name)} | set(_PADDED)
    if unknown := sorted(set(files.names()) - known):
        raise DataError(
            f"{place}: {unknown[0]} is not part of a {cfg.family} of this config.json ({len(unknown)} such)"
        )


@dataclass(frozen=True)
class _Cut:
    """A tensor without its last rows."""

    source: LazyTensor
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype  # type: ignore[attr-defined]

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        return self.source[region]


def as_hugging_face(directory: Path, cfg: ModelConfig, hf_map: TensorMap) -> Iterator[Named]:
    """Every tensor of a Megatron checkpoint by Hugging Face's name, in the order of `hf_map`."""
    sources = dict(read_megatron(directory, cfg))
    return translated(sources, megatron_map(cfg, str(directory)), hf_map)


def as_megatron(sources: Iterable[Named], cfg: ModelConfig, hf_map: TensorMap, where: str) -> Iterator[Named]:
    """Every tensor of a Hugging Face checkpoint by Megatron's name.

    Raises: DataError if a tensor is missing or has a wrong shape.
    """
    found = {name: (shape, tensor) for name, shape, tensor in sources}
    for name, shape in hf_map.their_shapes.items():
        if name not in found or tuple(found[name][0]) != shape:
            has = f"has shape {tuple(found[name][0])}" if name in found else "is missing"
            raise DataError(f"{where}: {name} {has}, config.json asks for {shape}")
    tensors = {name: tensor for name, (_, tensor) in found.items()}
    for name, shape, tensor in translated(tensors, hf_map, megatron_map(cfg, where)):
        is_swapped, is_in_turn = expert_order(cfg, name)
        yield name, *as_theirs(tensor, shape, is_swapped=is_swapped, is_in_turn=is_in_turn)


def has_equal_layers(named: Iterable[Named]) -> bool:
    """Do all layers have tensors of the same names and shapes?"""
    by_layer: dict[str, set[tuple[str, Shape]]] = {}
    for name, shape, _ in named:
        if name.startswith(LAYERS):
            layer, part = name.removeprefix(LAYERS).split(".", 1)
            by_layer.setdefault(layer, set()).add((part, shape))
    return len({frozenset(parts) for parts in by_layer.values()}) == 1


def translated(sources: Mapping[str, LazyTensor], from_map: TensorMap, to_map: TensorMap) -> Iterator[Named]:
    """The tensors of `to_map`, made of those of `from_map` that share slices of our parameters with them."""
    by_ours: dict[str, list[SharedSlice]] = {}
    for name in from_map.their_shapes:
        for shared in from_map.slices_of(name):
            by_ours.setdefault(shared.ours, []).append(shared)
    for name, shape in to_map.their_shapes.items():
        yield name, shape, _Translated(shape, to_map.slices_of(name), by_ours, sources)


@dataclass(frozen=True)
class _Translated:
    shape: Shape
    parts: list[SharedSlice]
    by_ours: Mapping[str, list[SharedSlice]]
    sources: Mapping[str, LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        source = self.by_ours[self.parts[0].ours][0].theirs
        return self.sources[source].dtype  # type: ignore[attr-defined]  # all kinds of lazy tensors have one

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        low = [part.indices(n)[0] for part, n in zip(region, self.shape, strict=True)]
        high = [part.indices(n)[1] for part, n in zip(region, self.shape)]
        out: Tensor | None = None
        for part in self.parts:
            ends = [a + n for a, n in zip(part.their_start, part.their_shape)]
            start = [max(a, b) for a, b in zip(low, part.their_start)]
            stop = [min(a, b) for a, b in zip(high, ends)]
            if any(a >= b for a, b in zip(start, stop)):
                continue
            place = tuple(slice(a - b, c - b) for a, b, c in zip(start, low, stop))
            size = tuple(b - a for a, b in zip(start, stop))
            inner = (a - b + c for a, b, c in zip(start, part.their_start, part.start[part.lead :]))
            ours_start = (*part.start[: part.lead], *inner)
            ours_shape = (*(1 for _ in range(part.lead)), *size)
            for source in self.by_ours.get(part.ours, ()):
                wanted = TensorSlice(torch.empty(ours_shape, device="meta"), ours_start, ours_shape)
                if (overlap := source.overlap(wanted)) is None:
                    continue
                theirs, ours = overlap
                read = self.sources[source.theirs][theirs]
                if out is None:
                    out = torch.empty([b - a for a, b in zip(low, high)], dtype=read.dtype)
                target = out[place].view(ours_shape)[ours] if part.lead else out[place][ours]
                target.copy_(read.reshape(target.shape))
        assert out is not None, "a region of a tensor that shares nothing"
        return out
