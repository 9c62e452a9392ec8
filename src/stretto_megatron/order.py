"""Experts in the order of Megatron's matrices and in that of our own, read by slices.

Some families store the matrices of their experts as [experts, in, out], and rows of gate and up in turn; Megatron
stores [experts, out, in], with all of gate before up. The map of names.py has the shapes of our order; tensors of a
Megatron checkpoint are read through `as_ours`, and written through `as_theirs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stretto.models.tensor_map import LazyTensor, Region, Shape

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from torch import Tensor


@dataclass(frozen=True)
class _Reordered:
    """A tensor whose numbers are those of another, in another order."""

    source: LazyTensor
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype  # type: ignore[attr-defined]  # all kinds of lazy tensors have one


class _Swapped(_Reordered):
    """A tensor with its last two dims swapped."""

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        *first, rows, columns = region
        return self.source[(*first, columns, rows)].mT


class _InTurn(_Reordered):
    """A tensor whose rows (dim 1) of gate and up come in turn, from one with gate first."""

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        experts, rows, *rest = region
        low, high, _ = rows.indices(self.shape[1])
        half, pairs = self.shape[1] // 2, (low // 2, -(-high // 2))
        parts = [self.source[(experts, slice(pairs[0] + at, pairs[1] + at), *rest)] for at in (0, half)]
        return torch.stack(parts, 2).flatten(1, 2)[:, low - 2 * pairs[0] : high - 2 * pairs[0]]


class _GateFirst(_Reordered):
    """A tensor with the rows (dim 1) of gate before those of up, from one in which they come in turn."""

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        experts, rows, *rest = region
        low, high, _ = rows.indices(self.shape[1])
        half, found = self.shape[1] // 2, []
        for at in (0, half):
            first, last = max(low, at) - at, min(high, at + half) - at
            if first < last:
                found.append(self.source[(experts, slice(2 * first, 2 * last), *rest)][:, at // half :: 2])
        return torch.cat(found, 1)


def as_ours(tensor: LazyTensor, their_shape: Shape, *, is_swapped: bool, is_in_turn: bool) -> LazyTensor:
    """A tensor of Megatron in our order."""
    found = _InTurn(tensor, their_shape) if is_in_turn else tensor
    return _Swapped(found, swapped(their_shape)) if is_swapped else found


def as_theirs(tensor: LazyTensor, our_shape: Shape, *, is_swapped: bool, is_in_turn: bool) -> tuple[Shape, LazyTensor]:
    """Shape and tensor in Megatron's order, from one in ours."""
    shape = swapped(our_shape) if is_swapped else our_shape
    found = _Swapped(tensor, shape) if is_swapped else tensor
    return shape, _GateFirst(found, shape) if is_in_turn else found


def swapped(shape: Shape) -> Shape:
    """A shape with its last two dims swapped."""
    return (*shape[:-2], shape[-1], shape[-2])
