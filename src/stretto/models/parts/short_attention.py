"""Attention over short segments with a hand-written gradient, for float32 on CPUs.

Rows are gathered head by head, so that scores, softmax and gradients are batched matrix products over contiguous
memory. The gradients of all calls are written into one tensor each for q, k and v. Longer segments use torch's flash
kernel (attention.py), which is also the slow reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class AttentionCall:
    """Segments that are computed together: the rows of their queries and keys."""

    queries: Int[Tensor, "segments queries"]
    keys: Int[Tensor, "segments keys"]
    is_padding: Bool[Tensor, "segments queries"] | None
    """Queries whose results are dropped; None: no padding."""
    bias: Float[Tensor, "segments queries keys"] | None
    """0 or -inf; None: causal, the last query aligned with the last key."""
    contiguous_rows: slice | None
    """The queries as a slice if they are contiguous, else None."""


@dataclass(frozen=True)
class _CallByHead:
    """A call as indices of rows per head: [segments, kv heads, query heads, tokens]."""

    shape: tuple[int, int, int, int]
    """Segments, kv heads, query rows per kv head, keys."""
    queries: Int[Tensor, " rows"]
    keys: Int[Tensor, " rows"]
    padding: Int[Tensor, " rows"] | None
    """Indices of `queries`."""
    bias: Tensor
    """[rows of queries, keys], or [segments, 1, queries, keys]."""
    results: slice
    """Its place among the results of all calls."""


class ShortAttention:
    """softmax(q k^T / sqrt(head_dim)) v for every call; rows without a query get 0."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self.calls = calls
        self._by_heads: dict[tuple[int, int, int], tuple[list[_CallByHead], Tensor, int]] = {}

    def __call__(
        self,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
    ) -> Float[Tensor, "tokens heads dim"]:
        """[tokens, heads, head_dim] for q of that shape, k and v [tokens, kv heads, head_dim]."""
        shape = (q.shape[0], q.shape[1], k.shape[1])
        if shape not in self._by_heads:
            self._by_heads[shape] = _split_by_head(self.calls, *shape)
        return _ShortAttention.apply(q, k, v, *self._by_heads[shape])


def _split_by_head(
    calls: Sequence[AttentionCall], num_rows: int, heads: int, kv_heads: int
) -> tuple[list[_CallByHead], Tensor, int]:
    """Every call by head, the index of each row's result, and the number of results.

    Rows that are no query have the result behind the last one, which is 0.
    """
    calls_by_head, start, per_kv = [], 0, heads // kv_heads
    end = sum(call.queries.numel() for call in calls) * heads
    place = torch.full((num_rows * heads,), end, device=calls[0].queries.device)
    for call in calls:
        segments, num_queries = call.queries.shape
        num_keys = call.keys.shape[1]
        queries = _by_head(call.queries, kv_heads, per_kv)
        results = slice(start, start + len(queries))
        numbers = torch.arange(results.start, results.stop, device=queries.device)
        padding = None
        if call.is_padding is None:
            place[queries] = numbers
        else:
            is_padding = call.is_padding[:, None].expand(segments, heads, num_queries).flatten()
            padding = is_padding.nonzero().squeeze(1)
            place[queries[~is_padding]] = numbers[~is_padding]
        bias = causal_bias(num_queries, num_keys).repeat(per_kv, 1) if call.bias is None else call.bias.unsqueeze(1)
        shape = (segments, kv_heads, per_kv * num_queries, num_keys)
        keys = _by_head(call.keys, kv_heads, 1)
        calls_by_head.append(_CallByHead(shape, queries, keys, padding, bias, results))
        start = results.stop
    return calls_by_head, place, end


def _by_head(rows: Int[Tensor, "segments tokens"], kv_heads: int, per_kv: int) -> Int[Tensor, " rows"]:
    """Rows of x [tokens, heads, dim] as indices into x.view(-1, dim), by kv head."""
    heads = torch.arange(kv_heads * per_kv, device=rows.device).view(kv_heads, per_kv, 1)
    return (rows[:, None, None, :] * len(heads) * per_kv + heads).flatten()


@functools.lru_cache(maxsize=1024)
def causal_bias(queries: int, keys: int) -> Float[Tensor, "queries keys"]:
    """0 where a query sees a key, -inf elsewhere; the last query sees all keys."""
    return torch.full((queries, keys), float("-inf")).triu(keys - queries + 1)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: list[_CallByHead], place: Tensor, num_results: int
    ) -> Tensor:
        dim = q.shape[-1]
        by_row, scale = [x.reshape(-1, dim) for x in (q, k, v)], dim**-0.5
        out = q.new_empty(num_results + 1, dim)
        out[-1] = 0
        saved = []
        for call in calls:
            segments, kv_heads, queries, keys = call.shape
            blocks = segments * kv_heads
            scaled = by_row[0].index_select(0, call.queries).view(blocks, queries, dim).mul_(scale)
            keys_seen, values = (x.index_select(0, call.keys).view(blocks, keys, dim) for x in by_row[1:])
            if call.bias.dim() == 2:
                scores = torch.baddbmm(call.bias, scaled, keys_seen.mT)
            else:
                scores = torch.bmm(scaled, keys_seen.mT)
                scores.view(segments, -1, *call.bias.shape[2:]).add_(call.bias)
            weights = scores.softmax(dim=-1)
            torch.bmm(weights, values, out=out[call.results].view(blocks, queries, dim))
            saved += [scaled, keys_seen, values, weights]
        ctx.save_for_backward(place, *saved)
        ctx.calls = calls
        return out.index_select(0, place).view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, *saved = ctx.saved_tensors
        dim, kv_heads = grad.shape[-1], ctx.calls[0].shape[1]
        by_row = grad.reshape(-1, dim)
        grad_q = grad.new_empty(ctx.calls[-1].results.stop + 1, dim)
        grad_q[-1] = 0
        grad_k, grad_v = grad.new_zeros(2, grad.shape[0] * kv_heads, dim)
        for i, call in enumerate(ctx.calls):
            scaled, keys_seen, values, weights = saved[4 * i : 4 * i + 4]
            grad_out = by_row.index_select(0, call.queries)
            if call.padding is not None:
                grad_out.index_fill_(0, call.padding, 0.0)
            grad_out = grad_out.view(scaled.shape)
            grad_v.index_add_(0, call.keys, torch.bmm(weights.mT, grad_out).view(-1, dim))
            grad_weights = torch.bmm(grad_out, values.mT)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            torch.bmm(grad_scores, keys_seen, out=grad_q[call.results].view(scaled.shape))
            grad_k.index_add_(0, call.keys, torch.bmm(grad_scores.mT, scaled).view(-1, dim))
        grad_q = grad_q.index_select(0, place).mul_(dim**-0.5).view(grad.shape)
        grad_k, grad_v = (x.view(-1, kv_heads, dim) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None, None
