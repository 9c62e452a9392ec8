"""Attention to chosen keys: each query attends to the earlier keys with the best scores.

`choose_keys` scores blocks of keys for blocks of queries and keeps the best so far, and `attend_chosen` gathers the
chosen keys for a few queries at a time, again in the backward pass. So memory grows with the tokens, not with their
square. Kernels of add-ons do both, and the loss of an index, without copies (`ChosenKernels`). Queries may be any part
of a row (`VisibleKeys`), with context parallelism those of one rank, while keys are always those of the whole row. The
index's vectors and the projections around the attention are in sparse_mla.py. The slow reference, a mask over the whole
row, is in the tests.

Source: DeepSeek Sparse Attention, arXiv:2512.02556, section 2.1. Differs: among keys of equal scores the earliest are
chosen, so that the choice does not depend on the sizes of blocks or on the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.models.device.kernels import find_kernels
from stretto.models.segments import SegmentTree

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int32, Int64

    from stretto.models.parts.attend import OwnTokens

NOT_A_KEY = -1
"""Entry of a choice whose query sees fewer keys than may be chosen."""
MAX_QUERIES, MAX_KEYS = 64, 2048
"""Most queries and keys of one block of scores."""
MAX_GATHERED = 1 << 22
"""Most elements of the keys that are gathered at once."""
_GPU_FACTOR = 16
"""Blocks on a GPU have this many times the elements, because small operations cost more there."""
_TINY = torch.finfo(torch.float32).tiny
HIDDEN = torch.iinfo(torch.int64).min
"""The code of a key that a query does not see."""
_INDEX_BITS = 32
_LAST = (1 << 31) - 1


class IndexVectors(NamedTuple):
    """The vectors that score keys: sum over heads of weights * relu(queries @ keys)."""

    queries: Float[Tensor, "queries heads dim"]
    weights: Float[Tensor, "queries heads"]
    keys: Float[Tensor, "keys dim"]


@dataclass(frozen=True)
class KeyChoice:
    """How the queries of a layer choose keys: the `ChosenKeys` of its `Limits` (models/parts/attend.py).

    source: the layer whose index chooses; scale: factor on the scores of the attention. chosen: the choices of this
    pass by layer, int32 [queries, chosen]; a layer that shares a choice, or is computed again, reads it from there.
    vectors: None if the layer has no index. loss_scale, losses: those of the index (`Routing`), used only in the source
    layer itself.
    """

    source: int
    top_k: int
    scale: float
    chosen: dict[int, Tensor]
    vectors: IndexVectors | None
    loss_scale: float | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)

    def attend(
        self,
        q: Float[Tensor, "queries heads dim"],
        k: Float[Tensor, "keys one dim"],
        v: Float[Tensor, "keys one value_dim"],
        tree: SegmentTree,
        own: OwnTokens | None = None,
    ) -> Float[Tensor, "queries heads value_dim"]:
        """As `ChosenKeys.attend`."""
        visible = _visible(tree, q.device, own)
        if own is None:
            return attend_chosen(self, q, k, v, visible)
        choice = self
        if self.vectors is not None:
            choice = replace(self, vectors=self.vectors._replace(keys=own.gather(self.vectors.keys)))
        k = own.gather(k)
        return attend_chosen(choice, q, k, k[..., : v.shape[-1]], visible)


@dataclass(frozen=True)
class _Block:
    """Queries [start, stop) and ranges (first, last, is_whole) of their keys.

    is_whole: all of these queries see the whole range.
    """

    start: int
    stop: int
    ranges: list[tuple[int, int, bool]]


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """The keys that each query sees: ranges [start, end) of its own segment and of those that it continues.

    spans: these bounds, int64 [queries, ranges, 2]. The first range ends with the query itself; empty ranges fill up.
    """

    spans: np.ndarray
    device: torch.device

    @classmethod
    def of(
        cls, tree: SegmentTree, device: torch.device, tokens: Int[np.ndarray, " queries"] | None = None
    ) -> VisibleKeys:
        """The keys that these tokens (None: all) of a row see."""
        bounds = tree.bounds
        tokens = np.arange(bounds[-1]) if tokens is None else tokens
        segments = np.searchsorted(bounds, tokens, side="right") - 1
        spans = [np.stack((bounds[segments], tokens + 1), 1)]
        above = tree.parents[segments]
        while (above >= 0).any():
            has_parent = above >= 0
            spans.append(np.where(has_parent[:, None], np.stack((bounds[above], bounds[above + 1]), 1), 0))
            above = np.where(has_parent, tree.parents[above], -1)
        return cls(np.stack(spans, 1), device)

    @cached_property
    def counts(self) -> Int[np.ndarray, " queries"]:
        """Keys that each query sees."""
        return (self.spans[:, :, 1] - self.spans[:, :, 0]).sum(1)

    @cached_property
    def max_count(self) -> int:
        """The most keys that a query sees."""
        return int(self.counts.max(initial=0))

    @cached_property
    def on_device(self) -> Int64[Tensor, "queries ranges two"]:
        return torch.from_numpy(self.spans).to(self.device)

    def is_visible(self, rows: slice, keys: Int[Tensor, " keys"]) -> Bool[Tensor, "rows keys"]:
        """True where a query of `rows` may see a key."""
        starts, ends = self.on_device[rows].unsqueeze(3).unbind(2)
        return ((keys >= starts) & (keys < ends)).any(1)

    def blocks(self) -> Iterator[_Block]:
        """All queries in blocks of neighbours, each with the keys that any of them sees."""
        factor = _GPU_FACTOR if self.device.type == "cuda" else 1
        breaks = (np.flatnonzero(np.diff(self.spans[:, 0, 1]) != 1) + 1).tolist()
        for low, high in zip([0, *breaks], [*breaks, len(self.spans)]):
            for start in range(low, high, MAX_QUERIES * factor):
                stop = min(start + MAX_QUERIES * factor, high)
                yield _Block(start, stop, self._ranges(self.spans[start:stop]))

    @staticmethod
    def _ranges(spans: np.ndarray) -> list[tuple[int, int, bool]]:
        spans = spans[:, (spans[:, :, 1] > spans[:, :, 0]).any(0)]
        hulls: list[tuple[int, int]] = []
        for column in range(spans.shape[1]):
            own = spans[spans[:, column, 1] > spans[:, column, 0], column]
            hulls.append((int(own[:, 0].min()), int(own[:, 1].max())))
        merged: list[tuple[int, int]] = []
        for low, high in sorted(hulls):
            if merged and merged[-1][1] > low:  # no key may be met twice
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        ranges = []
        for low, high in merged:
            for first in range(low, high, MAX_KEYS):
                last = min(first + MAX_KEYS, high)
                is_whole = ((spans[:, :, 0] <= first) & (spans[:, :, 1] >= last)).any(1).all()
                ranges.append((first, last, bool(is_whole)))
        return ranges


def _visible(tree: SegmentTree, device: torch.device, own: OwnTokens | None) -> VisibleKeys:
    """The same for all layers of a pass."""
    key = (VisibleKeys, device, own)
    if key not in tree.tables:
        tree.tables[key] = VisibleKeys.of(tree, device, None if own is None else own.tokens)
    found: VisibleKeys = tree.tables[key]
    return found


# -- the choice --


def index_scores(
    queries: Float[Tensor, "rows heads dim"], weights: Float[Tensor, "rows heads"], keys: Float[Tensor, "keys dim"]
) -> Float[Tensor, "rows keys"]:
    """sum over heads of weights * relu(queries @ keys), equation 1 of the paper."""
    by_head = (queries.flatten(0, 1) @ keys.T).relu_().unflatten(0, queries.shape[:2])
    return (weights.unsqueeze(1) @ by_head).squeeze(1)


@torch.no_grad()
def choose_keys(vectors: IndexVectors, visible: VisibleKeys, top_k: int) -> Int32[Tensor, "queries chosen"]:
    """The best keys among those that each query sees, by index; NOT_A_KEY comes first."""
    count = min(top_k, visible.max_count)
    if (kernels := _index_kernels(vectors)) is not None:
        return kernels.choose(*vectors, visible.spans, count)
    queries, weights, keys = (part.float() for part in vectors)
    chosen = torch.full((len(queries), count), NOT_A_KEY, dtype=torch.int32, device=keys.device)
    for block in visible.blocks():
        rows = slice(block.start, block.stop)
        needs_scores = int(visible.counts[rows].max()) > top_k
        best: Tensor | None = None
        for low, high, is_whole in block.ranges:
            numbers = torch.arange(low, high, device=keys.device)
            if needs_scores:
                codes = rank_codes(index_scores(queries[rows], weights[rows], keys[low:high]), numbers)
            else:
                codes = (_LAST - numbers).expand(block.stop - block.start, -1)
            if not is_whole:
                codes = codes.masked_fill(~visible.is_visible(rows, numbers), HIDDEN)
            best = codes if best is None else torch.cat((best, codes), 1)
            if best.shape[1] > count:
                best = best.topk(count, dim=1, sorted=False).values
        assert best is not None, "a query sees itself"
        numbers = key_numbers(best).masked_fill(best == HIDDEN, NOT_A_KEY).sort(dim=1).values
        chosen[rows, count - numbers.shape[1] :] = numbers.int()
    return chosen


def rank_codes(scores: Float[Tensor, "rows keys"], numbers: Int64[Tensor, " keys"]) -> Int64[Tensor, "rows keys"]:
    """Distinct integers in the order of scores; among equal ones the earlier key is higher."""
    bits = (scores + 0.0).view(torch.int32)  # without -0.0
    order = torch.where(bits < 0, bits ^ _LAST, bits)
    return (order.long() << _INDEX_BITS) | (_LAST - numbers)


def key_numbers(codes: Int64[Tensor, "rows keys"]) -> Int64[Tensor, "rows keys"]:
    """The numbers of the keys with these codes."""
    return _LAST - (codes & _LAST)


# -- the attention --


def attend_chosen(
    choice: KeyChoice,
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "keys one dim"],
    v: Float[Tensor, "keys one value_dim"],
    visible: VisibleKeys,
) -> Float[Tensor, "queries heads value_dim"]:
    """Attention of queries to their chosen keys; v is the first dims of k, shared by heads.

    Vectors and keys are those of the whole row; queries are those of `visible`.
    """
    chosen = choice.chosen.get(choice.source)
    if chosen is None:
        assert choice.vectors is not None, f"layer {choice.source} has made no choice"
        if not torch.is_grad_enabled():
            choice.chosen.clear()  # choices of earlier layers are needed in the backward pass only
        chosen = choose_keys(choice.vectors, visible, choice.top_k)
        choice.chosen[choice.source] = chosen
    counts = np.minimum(visible.counts, choice.top_k)
    k, value_dim = k.squeeze(1), v.shape[-1]
    has_loss = choice.loss_scale is not None and choice.vectors is not None and torch.is_grad_enabled()
    if (kernels := _attention_kernels(q, k, value_dim)) is not None:
        out, weights = kernels.attend(q, k, chosen, counts, value_dim, choice.scale, has_means=has_loss)
    else:
        out = _ChosenAttention.apply(q, k, chosen, counts, value_dim, choice.scale)
    if not has_loss:
        return out
    assert choice.vectors is not None and choice.loss_scale is not None
    if kernels is not None and weights is not None and _index_kernels(choice.vectors) is not None:
        out, loss = kernels.add_index_loss(out, *choice.vectors, weights, chosen, counts, choice.loss_scale)
    else:
        out, loss = _IndexLoss.apply(out, *choice.vectors, q.detach(), k.detach(), chosen, counts, choice)
    choice.losses[choice.source] = loss.detach()
    return out


def _index_kernels(vectors: IndexVectors) -> ChosenKernels | None:
    found = find_kernels("cpu.chosen")
    return None if found is None else found.find_index_kernels(*vectors)


def _attention_kernels(q: Tensor, k: Tensor, value_dim: int) -> ChosenKernels | None:
    found = find_kernels("cpu.chosen")
    return None if found is None else found.find_attention_kernels(q, k, value_dim)


class ChosenKernels(Protocol):
    """Kernels for the choice, the attention and the index's loss, each a call per pass, with gradients.

    chosen: the numbers of each query's keys in their order; the last counts[query] of a row are keys.
    """

    def choose(
        self,
        queries: Float[Tensor, "queries heads dim"],
        weights: Float[Tensor, "queries heads"],
        keys: Float[Tensor, "keys dim"],
        spans: Int64[np.ndarray, "queries ranges two"],
        count: int,
    ) -> Int32[Tensor, "queries chosen"]:
        """The `count` best keys in these ranges; NOT_A_KEY before them where a query sees fewer."""

    def attend(
        self,
        q: Float[Tensor, "queries heads dim"],
        k: Float[Tensor, "keys dim"],
        chosen: Int32[Tensor, "queries chosen"],
        counts: Int[np.ndarray, " queries"],
        value_dim: int,
        scale: float,
        *,
        has_means: bool,
    ) -> tuple[Float[Tensor, "queries heads value_dim"], Float[Tensor, "queries chosen"] | None]:
        """The result of the attention, and its weights averaged over heads, if asked for."""

    def add_index_loss(
        self,
        out: Float[Tensor, "queries heads value_dim"],
        queries: Float[Tensor, "queries index_heads dim"],
        weights: Float[Tensor, "queries index_heads"],
        keys: Float[Tensor, "keys dim"],
        attention: Float[Tensor, "queries chosen"],
        chosen: Int32[Tensor, "queries chosen"],
        counts: Int[np.ndarray, " queries"],
        scale: float,
    ) -> tuple[Float[Tensor, "queries heads value_dim"], Float[Tensor, ""]]:
        """`_IndexLoss` of the weights that `attend` has returned."""


class _ChosenAttention(torch.autograd.Function):
    """Softmax attention of a few queries at a time; the backward pass recomputes weights."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, chosen: Tensor, counts: np.ndarray, value_dim: int, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, chosen)
        ctx.counts, ctx.value_dim, ctx.scale = counts, value_dim, scale
        out = q.new_empty(*q.shape[:2], value_dim)
        for rows, columns in _gathered_rows(counts, k):
            keys, weights, _ = attend_rows(q[rows], k, chosen[rows, -columns:], scale)
            out[rows] = weights @ keys[..., :value_dim]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, chosen = ctx.saved_tensors
        dq, dk = torch.empty_like(q), torch.zeros_like(k, dtype=torch.float32)
        for rows, columns in _gathered_rows(ctx.counts, k):
            keys, weights, places = attend_rows(q[rows], k, chosen[rows, -columns:], ctx.scale)
            slopes = (grad[rows] @ keys[..., : ctx.value_dim].transpose(1, 2)).float()
            inner = (weights.float() * slopes).sum(-1, keepdim=True)
            slopes = (weights.float() * (slopes - inner) * ctx.scale).to(q.dtype)
            dq[rows] = slopes @ keys
            dkeys = slopes.transpose(1, 2) @ q[rows]
            dkeys[..., : ctx.value_dim] += weights.transpose(1, 2) @ grad[rows]
            dk.index_add_(0, places.flatten(), dkeys.flatten(0, 1).float())
        return dq, dk.to(k.dtype), None, None, None, None


class _IndexLoss(torch.autograd.Function):
    """Adds the gradient of KL(attention, index), summed over queries, to the index only.

    attention: the mean over heads of the weights of the chosen keys; index: softmax of their scores. `out`, the result
    of the attention, is returned unchanged, and so is its gradient. Source: equation 4 of the paper.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, queries: Tensor, weights: Tensor, keys: Tensor, q: Tensor, k: Tensor,
        chosen: Tensor, counts: np.ndarray, choice: KeyChoice,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(queries, weights, keys, q, k, chosen)
        ctx.counts, ctx.scale, ctx.loss_scale = counts, choice.scale, choice.loss_scale
        total = torch.zeros((), device=q.device)
        for rows, columns in _gathered_rows(counts, k):
            places = chosen[rows, -columns:]
            attention = attend_rows(q[rows], k, places, choice.scale)[1].float().mean(1)
            index = _index_rows(queries[rows], weights[rows], keys, places)[0].log_softmax(-1)
            total += (attention * (attention.clamp_min(_TINY).log() - index)).nan_to_num(0.0).sum()
        ctx.mark_non_differentiable(total)
        return out.view_as(out), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        queries, weights, keys, q, k, chosen = ctx.saved_tensors
        dqueries, dweights = torch.empty_like(queries), torch.empty_like(weights)
        dkeys = torch.zeros_like(keys, dtype=torch.float32)
        for rows, columns in _gathered_rows(ctx.counts, k):
            places = chosen[rows, -columns:]
            attention = attend_rows(q[rows], k, places, ctx.scale)[1].float().mean(1)
            scores, by_head, gathered, at = _index_rows(queries[rows], weights[rows], keys, places)
            slopes = (scores.softmax(-1) - attention) * ctx.loss_scale
            dweights[rows] = (by_head @ slopes.unsqueeze(-1)).squeeze(-1)
            slopes = weights[rows].unsqueeze(-1) * slopes.unsqueeze(1) * (by_head > 0)
            dqueries[rows] = (slopes @ gathered).to(queries.dtype)
            dkeys.index_add_(0, at.flatten(), (slopes.transpose(1, 2) @ queries[rows].float()).flatten(0, 1))
        return grad, dqueries, dweights, dkeys.to(keys.dtype), None, None, None, None, None


def _index_rows(
    queries: Float[Tensor, "rows heads dim"],
    weights: Float[Tensor, "rows heads"],
    keys: Float[Tensor, "keys dim"],
    chosen: Int32[Tensor, "rows chosen"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of chosen keys (-inf: none), the relu by head, the gathered keys, their places."""
    places = chosen.clamp_min(0).long()
    gathered = keys.index_select(0, places.flatten()).unflatten(0, places.shape).float()
    by_head = (queries.float() @ gathered.transpose(1, 2)).relu()
    scores = (weights.unsqueeze(1) @ by_head).squeeze(1)
    return scores.masked_fill(chosen == NOT_A_KEY, float("-inf")), by_head, gathered, places


def _gathered_rows(counts: np.ndarray, k: Tensor) -> Iterator[tuple[slice, int]]:
    """Ranges of queries whose keys are gathered together, and the most keys of one of them."""
    limit = MAX_GATHERED * (_GPU_FACTOR if k.is_cuda else 1) // k.shape[1]
    start = 0
    while start < len(counts):
        size = max(limit // max(int(counts[start : start + MAX_QUERIES].max()), 1), 1)
        stop = min(start + min(size, MAX_QUERIES), len(counts))
        yield slice(start, stop), int(counts[start:stop].max())
        start = stop


def attend_rows(
    q: Float[Tensor, "rows heads dim"], k: Float[Tensor, "keys dim"], chosen: Int32[Tensor, "rows chosen"], scale: float
) -> tuple[Float[Tensor, "rows chosen dim"], Float[Tensor, "rows heads chosen"], Int64[Tensor, "rows chosen"]]:
    """Gathered keys, attention weights in their dtype, and the keys' places."""
    places = chosen.clamp_min(0).long()
    keys = k.index_select(0, places.flatten()).unflatten(0, places.shape)
    scores = (q @ keys.transpose(1, 2)).float() * scale
    scores = scores.masked_fill((chosen == NOT_A_KEY).unsqueeze(1), float("-inf"))
    return keys, F.softmax(scores, dim=-1).to(q.dtype), places
