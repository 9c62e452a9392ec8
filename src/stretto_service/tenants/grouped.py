"""Products of many adapters at once on a CPU, where torch has no fast grouped product.

The rows of one group (a tenant, or a tenant at one expert) have one pair of matrices. Groups are cut into blocks of the
same number of rows, the last block of each filled up with zeros, so that all products of a layer are a few batched
ones, and the backward pass has one node instead of several per tenant. A block has rows and matrices of one group only:
nothing of another group enters its sums, not even NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from jaxtyping import Float

_SIZES = (8, 16, 32, 64, 128)
_BLOCK_COST_ROWS = 8
"""The cost of one more block, in rows."""


@dataclass(frozen=True)
class Blocks:
    """How rows are cut into blocks of `size` rows. The stack has one entry per group that has rows and an adapter.

    entries: the stack's entry of each block; None: block i has entry i. picks: by adapter, its matrices in the stack;
    None: all of them. slots: each row's place among the rows of all blocks; None: rows fill the blocks as they are.
    rows: which rows have an adapter; None: all. scales: of each block, [blocks, 1, 1].
    """

    size: int
    num_entries: int
    entries: Tensor | None
    picks: tuple[Tensor | None, ...]
    slots: Tensor | None
    rows: Tensor | None
    scales: Tensor

    def cut(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "blocks size width"]:
        """The rows in their blocks."""
        if self.slots is None:
            return x.view(-1, self.size, x.shape[1])
        blocks = x.new_zeros(len(self.scales), self.size, x.shape[1])
        chosen = x if self.rows is None else x.index_select(0, self.rows)
        blocks.view(-1, x.shape[1]).index_copy_(0, self.slots, chosen)
        return blocks

    def join(self, blocks: Float[Tensor, "blocks size width"], num_rows: int) -> Float[Tensor, "rows width"]:
        """The inverse of `cut`; rows without an adapter are 0."""
        flat = blocks.view(-1, blocks.shape[2])
        if self.slots is None:
            return flat
        chosen = flat.index_select(0, self.slots)
        if self.rows is None:
            return chosen
        return flat.new_zeros(num_rows, flat.shape[1]).index_copy_(0, self.rows, chosen)

    def spread(self, stack: Float[Tensor, "entries m n"]) -> Float[Tensor, "blocks m n"]:
        """Each block's matrix."""
        return stack if self.entries is None else stack.index_select(0, self.entries)

    def collect(self, blocks: Float[Tensor, "blocks m n"]) -> Float[Tensor, "entries m n"]:
        """Sums of each entry's blocks."""
        if self.entries is None:
            return blocks
        return blocks.new_zeros(self.num_entries, *blocks.shape[1:]).index_add_(0, self.entries, blocks)


@lru_cache(maxsize=32)
def cut_blocks(
    counts: tuple[int, ...], scalings: tuple[float | None, ...], dtype: torch.dtype, device: torch.device
) -> Blocks:
    """Blocks of rows that are sorted by expert, then by tenant, counts[expert * tenants + tenant] of each.

    scalings: of the tenants' adapters; None: has none. Layers without experts have one.
    """
    sizes = np.array(counts).reshape(-1, len(scalings))
    has = np.array([scaling is not None for scaling in scalings])
    is_used = (sizes > 0) & has
    # Entries are in the order of tenants, rows in that of experts.
    entry_of = (is_used.T.cumsum() - 1).reshape(is_used.T.shape).T
    used = sizes[is_used]
    size = _block_size(used)
    num_blocks = -(-used // size)
    entries = entry_of[is_used].repeat(num_blocks)
    first_rows = np.cumsum(num_blocks) * size - num_blocks * size
    slots = np.arange(used.sum()) + (first_rows - (np.cumsum(used) - used)).repeat(used)
    rows = np.flatnonzero(is_used.reshape(-1).repeat(sizes.reshape(-1)))
    index = lambda values: torch.from_numpy(values.astype(np.int64)).to(device)
    is_plain = len(rows) == sizes.sum() and bool((used == size).all())
    picks = (np.flatnonzero(is_used[:, tenant]) for tenant in np.flatnonzero(has))
    scales = np.array([0.0 if scaling is None else scaling for scaling in scalings])
    by_group = np.broadcast_to(scales, sizes.shape)[is_used]
    return Blocks(
        size,
        len(used),
        None if np.array_equal(entries, np.arange(len(used))) else index(entries),
        tuple(None if len(pick) == len(sizes) else index(pick) for pick in picks),
        None if is_plain else index(slots),
        None if len(rows) == sizes.sum() else index(rows),
        torch.tensor(by_group.repeat(num_blocks), dtype=scale_dtype(dtype), device=device).view(-1, 1, 1),
    )


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales for rows of this dtype: in 16 bits a scale such as 4/3 would be up to 0.2 % wrong."""
    return torch.promote_types(dtype, torch.float32)


def _block_size(used: np.ndarray) -> int:
    """The number of rows per block that keeps both padding and the number of blocks small."""
    largest = int(used.max(initial=1))
    candidates = [largest, *(size for size in _SIZES if size < largest)]
    return min(candidates, key=lambda size: int((-(-used // size)).sum()) * (size + _BLOCK_COST_ROWS))


def add_products(
    out: Float[Tensor, "rows out"],
    x: Float[Tensor, "rows in"],
    pairs: Sequence[tuple[Float[Tensor, " ..."], Float[Tensor, " ..."]] | None],
    scalings: Sequence[float],
    counts: Sequence[int],
) -> Float[Tensor, "rows out"]:
    """Add scaling * second first x of each row's group to `out`, in place.

    pairs: by tenant, first [rank, in] and second [out, rank], or of every expert; ranks may differ; None adds nothing.
    counts: rows of each group, as `cut_blocks` takes them.
    """
    known = tuple(None if pair is None else scaling for pair, scaling in zip(pairs, scalings, strict=True))
    blocks = cut_blocks(tuple(counts), known, x.dtype, x.device)
    halves = [half for pair in pairs if pair is not None for half in pair]
    if not blocks.num_entries:
        return out
    return _AddProducts.apply(out.contiguous(), x.contiguous(), blocks, *halves)


class _AddProducts(torch.autograd.Function):
    """`add_products` as one node; its arguments are checked there."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, blocks: Blocks, *halves: Tensor) -> Tensor:
        first, second = _stack(halves[::2], blocks, 0), _stack(halves[1::2], blocks, 1)
        low = torch.bmm(blocks.cut(x), blocks.spread(first).mT).mul_(blocks.scales)
        if blocks.slots is None:
            blocks.cut(out).baddbmm_(low, blocks.spread(second).mT)
        else:
            added = torch.bmm(low, blocks.spread(second).mT)
            out += blocks.join(added, len(out))
        ctx.mark_dirty(out)
        ctx.blocks, ctx.shapes = blocks, [half.shape for half in halves]
        ctx.save_for_backward(x, low, first, second)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, first, second = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        rows = blocks.cut(grad.contiguous())
        low_grad = torch.bmm(rows, blocks.spread(second)).mul_(blocks.scales)
        x_grad = None
        if ctx.needs_input_grad[1]:
            x_grad = blocks.join(torch.bmm(low_grad, blocks.spread(first)), len(grad))
        halves: list[Tensor | None] = [None] * len(ctx.shapes)
        if any(ctx.needs_input_grad[3:]):
            first_grad = blocks.collect(torch.bmm(low_grad.mT, blocks.cut(x)))
            # `low` has the scale already.
            second_grad = blocks.collect(torch.bmm(rows.mT, low))
            halves[::2] = _unstack(first_grad, ctx.shapes[::2], blocks, 0)
            halves[1::2] = _unstack(second_grad, ctx.shapes[1::2], blocks, 1)
        return grad, x_grad, None, *halves


def _stack(halves: Sequence[Tensor], blocks: Blocks, dim: int) -> Tensor:
    """One stack of the matrices that have rows, of the largest rank: filled up with zeros along `dim`."""
    if _are_alike([half.shape for half in halves], blocks):
        return torch.stack(list(halves))
    parts = []
    rank = max(half.shape[dim - 2] for half in halves)
    for half, pick in zip(halves, blocks.picks, strict=True):
        part = half if half.dim() == 3 else half[None]
        part = part if pick is None else part.index_select(0, pick)
        if missing := rank - part.shape[dim - 2]:
            shape = [*part.shape]
            shape[dim - 2] = missing
            part = torch.cat([part, part.new_zeros(shape)], dim - 2)
        parts.append(part)
    return torch.cat(parts)


def _unstack(stack: Tensor, shapes: Sequence[torch.Size], blocks: Blocks, dim: int) -> list[Tensor | None]:
    """The gradient of each adapter's matrices; None for an adapter without rows."""
    if _are_alike(shapes, blocks):
        return list(stack.unbind())
    gradients: list[Tensor | None] = []
    start = 0
    for shape, pick in zip(shapes, blocks.picks, strict=True):
        num_all = shape[0] if len(shape) == 3 else 1
        stop = start + (num_all if pick is None else len(pick))
        part = stack[start:stop].narrow(dim - 2, 0, shape[dim - 2])
        if start == stop:
            gradients.append(None)
        elif len(shape) == 2:
            gradients.append(part[0])
        else:
            whole = part if pick is None else part.new_zeros(shape).index_copy_(0, pick, part)
            gradients.append(whole)
        start = stop
    return gradients


def _are_alike(shapes: Sequence[torch.Size], blocks: Blocks) -> bool:
    """True if adapters are single matrices of one rank that all have rows: the usual and fast case."""
    return len(shapes[0]) == 2 and len(set(shapes)) == 1 and all(pick is None for pick in blocks.picks)
