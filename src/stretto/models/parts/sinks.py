"""Attention with sinks: each head has a logit in the softmax that has no value.

Computed in float32 in pieces of queries, of which only the result and the logarithm of the softmax's denominator are
kept for the backward pass, so that memory does not grow with the square of the length.

Source: StreamingLLM, arXiv:2309.17453, section 3.2 (a learnable sink); gpt-oss has one per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from jaxtyping import Float

_MAX_SCORES = 1 << 26
"""Most scores in memory at one time."""


def attend_with_sinks(
    q: Float[Tensor, "segments queries heads dim"],
    k: Float[Tensor, "segments keys kv_heads dim"],
    v: Float[Tensor, "segments keys kv_heads dim"],
    sinks: Float[Tensor, " heads"],
    bias: Float[Tensor, "segments queries keys"] | None = None,
) -> Float[Tensor, "segments queries heads dim"]:
    """Attention of segments, queries aligned with the last keys; causal, or by a 0/-inf bias."""
    return _SinkAttention.apply(q, k, v, sinks, bias)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None
    ) -> Float[Tensor, "segments queries heads dim"]:
        out, norms = torch.empty_like(q), []
        keys, values = (x.float().permute(0, 2, 3, 1) for x in (k, v))  # [segments, kv heads, dim, keys]
        kv_heads = k.shape[2]
        by_head = sinks.float().view(kv_heads, -1, 1)
        for rows, seen in _pieces(q, k, bias):
            scores = _scores(q, keys, bias, rows, seen)
            peak = torch.maximum(scores.amax(-1), by_head)
            weights = scores.sub_(peak.unsqueeze(-1)).exp_()
            total = weights.sum(-1) + (by_head - peak).exp()
            mixed = _times(weights, values[..., :seen].mT) / total.unsqueeze(-1)
            out[:, rows] = _by_token(mixed).to(q.dtype)
            norms.append(peak + total.log())
        ctx.save_for_backward(q, k, v, sinks, bias, out, torch.cat(norms, dim=-1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, bias, out, norms = ctx.saved_tensors
        keys, values = (x.float().permute(0, 2, 3, 1) for x in (k, v))
        kv_heads, scale = k.shape[2], q.shape[-1] ** -0.5
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        grad_sinks = torch.zeros_like(sinks, dtype=torch.float32)
        for rows, seen in _pieces(q, k, bias):
            weights = _scores(q, keys, bias, rows, seen).sub_(norms[..., rows].unsqueeze(-1)).exp_()
            slope, queries = (_by_head(x[:, rows], kv_heads) for x in (grad, q))
            inner = (slope * _by_head(out[:, rows], kv_heads)).sum(-1)
            share = (sinks.float().view(kv_heads, -1, 1) - norms[..., rows]).exp()
            grad_sinks -= (share * inner).sum((0, 3)).flatten()
            grad_v[..., :seen] += _outer(slope, weights)
            grad_scores = weights.mul_(_times(slope, values[..., :seen]) - inner.unsqueeze(-1)).mul_(scale)
            grad_q[:, rows] = _by_token(_times(grad_scores, keys[..., :seen].mT)).to(q.dtype)
            grad_k[..., :seen] += _outer(queries, grad_scores)
        back = [x.permute(0, 3, 1, 2).to(k.dtype) for x in (grad_k, grad_v)]
        return grad_q, *back, grad_sinks.to(sinks.dtype), None


def _pieces(q: Tensor, k: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, int]]:
    """Pieces of the queries, and the number of keys that they may see."""
    segments, queries, heads, _ = q.shape
    keys = k.shape[1]
    step = max(_MAX_SCORES // (segments * heads * keys), 16)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield slice(start, stop), keys if bias is not None else keys - queries + stop


def _scores(q: Tensor, keys: Tensor, bias: Tensor | None, rows: slice, seen: int) -> Tensor:
    """[segments, kv heads, group, rows, seen keys], -inf where a query does not see a key."""
    scores = _times(_by_head(q[:, rows], keys.shape[1]) * q.shape[-1] ** -0.5, keys[..., :seen])
    if bias is not None:
        return scores.add_(bias[:, None, None, rows].float())
    num = rows.stop - rows.start
    is_later = torch.ones(num, seen, dtype=torch.bool, device=q.device).triu(seen - num + 1)
    return scores.masked_fill_(is_later, float("-inf"))


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """[segments, rows, heads, dim] -> float32 [segments, kv heads, group, rows, dim]."""
    return x.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_token(x: Tensor) -> Tensor:
    """The reverse of `_by_head`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """[segments, kv heads, group, rows, n] @ [segments, kv heads, n, m]."""
    return (x.flatten(2, 3) @ matrix).unflatten(2, x.shape[2:4])


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """Sum over group and rows of x [..., n] times y [..., m]: [segments, kv heads, n, m]."""
    return x.flatten(2, 3).mT @ y.flatten(2, 3)
