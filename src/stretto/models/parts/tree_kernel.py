"""Attention over a tree of segments as one kernel of a GPU: torch's flex attention with a mask from the tree.

The mask is known block by block from the runs that each segment sees (segments.py), so no matrix of all pairs of
tokens is made; blocks that no token sees are skipped, and those that every token sees need no mask.

Source: FlexAttention, arXiv:2412.05496. Differs: the blocks are counted from the tree.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from stretto.models.segments import SegmentTree

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BLOCK = 128
"""Tokens along one side of a block."""


def build_mask(tree: SegmentTree, window: int | None, device: torch.device) -> BlockMask:
    """What the tokens of a row see: their ancestors and themselves, at most `window` tokens (None: all)."""
    counts = count_seen(tree)
    is_whole = counts == BLOCK**2 if window is None else np.zeros_like(counts, bool)
    first, last = (torch.from_numpy(np.repeat(side, tree.lengths)).to(device, torch.int32) for side in tree.intervals)
    positions = np.arange(tree.bounds[-1]) + np.repeat(tree.prefixes - tree.bounds[:-1], tree.lengths)
    place = torch.from_numpy(positions).to(device, torch.int32)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_above = (first[key] <= first[query]) & (first[query] < last[key]) & (place[key] <= place[query])
        return is_above if window is None else is_above & (place[query] - place[key] < window)

    return BlockMask.from_kv_blocks(
        *_by_row((counts > 0) & ~is_whole, device),
        *_by_row(is_whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(int(tree.bounds[-1]), int(tree.bounds[-1])),
    )


def attend_tree(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    mask: BlockMask,
) -> Float[Tensor, "tokens heads dim"]:
    """Attention of one row by a mask of `build_mask`; on a CPU without gradients, with all scores in memory."""
    by_head = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    kernel = _compiled() if q.is_cuda else flex_attention
    out = kernel(*by_head, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    """One kernel for rows of any length."""
    return torch.compile(flex_attention, dynamic=True)


def count_seen(tree: SegmentTree) -> Int[np.ndarray, "blocks blocks"]:
    """How many pairs of a query and a key that it sees each pair of blocks has."""
    num = -(-int(tree.bounds[-1]) // BLOCK)
    counts = np.zeros((num, num), np.int64)
    for segment in np.flatnonzero(tree.lengths).tolist():
        queries, sizes = _overlaps(tree, segment)
        for ancestor in tree.ancestors[segment]:
            if tree.lengths[ancestor]:
                keys, others = _overlaps(tree, ancestor)
                counts[queries, keys] += np.outer(sizes, others)
        own = np.tril(np.outer(sizes, sizes), -1)
        np.fill_diagonal(own, sizes * (sizes + 1) // 2)
        counts[queries, queries] += own
    return counts


def _overlaps(tree: SegmentTree, segment: int) -> tuple[slice, Int[np.ndarray, " blocks"]]:
    """The blocks in which a segment's tokens are, and how many of them are in each."""
    start, end = int(tree.bounds[segment]), int(tree.bounds[segment + 1])
    blocks = np.arange(start // BLOCK, -(-end // BLOCK))
    sizes = np.minimum(end, (blocks + 1) * BLOCK) - np.maximum(start, blocks * BLOCK)
    return slice(int(blocks[0]), int(blocks[-1]) + 1), sizes


def _by_row(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per row of blocks: how many are chosen, and their numbers, the chosen ones first."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    to_device = lambda x: torch.from_numpy(x[None, None]).to(device, torch.int32)
    return to_device(blocks.sum(1)), to_device(order)
