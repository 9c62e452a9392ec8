"""Attention to keys that an index chooses, the choice, and the index's loss, each as one call per pass.

For float32 and bfloat16 on a CPU; models/parts/mixers/key_choice.py explains them, and has the same in torch's
operations, which are many and small: they score, gather and multiply a few queries at a time. Here each query reads its
keys where they are. In bfloat16 values are rounded where torch's operations round them, so that a trainer stays at its
engine's logprobs. Results do not depend on the number of threads, nor those of a query on the rest of the row.
"""

from __future__ import annotations

import functools
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.models.device.kernels import PLAIN
from stretto_native.library import DTYPES, LANES, declare, find_library

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Int32, Int64


MAX_HALF = 8192
"""Most elements of a bfloat16 query, in all its heads: products here are those of float32. With more, torch's products
of bfloat16 values are faster on processors that have them."""


class _Choice(Structure):
    """`Choice` in chosen.c."""

    _fields_ = (
        *((name, c_int64) for name in ("queries", "heads", "dim", "ranges", "chosen", "longest", "threads")),
        ("spans", c_void_p),
    )


class _Chosen(Structure):
    """`Chosen` in chosen.c."""

    _fields_ = (
        *((name, c_int64) for name in ("queries", "heads", "dim", "value_dim", "num_keys", "chosen", "threads")),
        ("is_half", c_int64),
        *((name, c_void_p) for name in ("keys", "counts")),
        ("scale", c_float),
    )


class ChosenKernels:
    """The functions of chosen.c.

    chosen: int32 [queries, chosen], the numbers of each query's keys in their order; the last counts[query] of a row
    are keys.
    """

    def __init__(self) -> None:
        library = find_library()
        assert library is not None
        self._choose = declare(library.choose_keys, "ppppp")
        self._forward = declare(library.chosen_forward, "ppppp")
        self._backward = declare(library.chosen_backward, "pppppp")
        self._loss = declare(library.index_loss_forward, "pppppp")
        self._loss_backward = declare(library.index_loss_backward, "pppppppp")

    def choose(
        self,
        queries: Float[Tensor, "queries heads dim"],
        weights: Float[Tensor, "queries heads"],
        keys: Float[Tensor, "keys dim"],
        spans: Int64[np.ndarray, "queries ranges two"],
        count: int,
    ) -> Int32[Tensor, "queries chosen"]:
        """The `count` keys in `spans` with the highest sums over heads of weights * relu(queries @ keys).

        spans: ranges of keys, of each query the last first. A query that sees fewer keys has -1 before them.
        """
        queries, weights, spans = _floats(queries), _floats(weights), np.ascontiguousarray(spans, np.int64)
        tiles = (
            F.pad(keys.float(), (0, 0, 0, -len(keys) % LANES)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
        )
        chosen = torch.empty(len(queries), count, dtype=torch.int32)
        longest = int((spans[:, :, 1] - spans[:, :, 0]).sum(1).max(initial=0))
        choice = _Choice(
            *queries.shape, spans.shape[1], count, longest, torch.get_num_threads(), spans.ctypes.data
        )  # fmt: skip
        self._choose(byref(choice), *(x.data_ptr() for x in (queries, weights, tiles, chosen)))
        return chosen

    def attend_forward(
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
        """Softmax attention whose values are the first dims of k, and the weights averaged over heads, if asked for."""
        q, keys, chosen = q.contiguous(), _floats(k), chosen.contiguous()
        out = q.new_empty(*q.shape[:2], value_dim)
        means = q.new_empty(chosen.shape, dtype=torch.float32) if has_means else None
        job = _job(q, keys, chosen, counts, value_dim, scale)
        self._forward(byref(job), *(x if x is None else x.data_ptr() for x in (q, keys, out, means)))
        return out, means

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
        """As `attend_forward`, with gradients."""
        return _Attention.apply(q, k, chosen, counts, value_dim, scale, has_means, self)

    def attend_backward(
        self,
        q: Float[Tensor, "queries heads dim"],
        k: Float[Tensor, "keys dim"],
        chosen: Int32[Tensor, "queries chosen"],
        counts: Int[np.ndarray, " queries"],
        grad: Float[Tensor, "queries heads value_dim"],
        scale: float,
    ) -> tuple[Float[Tensor, "queries heads dim"], Float[Tensor, "keys dim"]]:
        """Gradients of q and k."""
        q, keys, chosen, grad = q.contiguous(), _floats(k), chosen.contiguous(), grad.contiguous()
        grad_q, grad_k = torch.empty_like(q), torch.zeros_like(keys)
        job = _job(q, keys, chosen, counts, grad.shape[-1], scale)
        self._backward(byref(job), *(x.data_ptr() for x in (q, keys, grad, grad_q, grad_k)))
        return grad_q, grad_k.to(k.dtype)

    def index_loss_forward(
        self,
        queries: Float[Tensor, "queries heads dim"],
        weights: Float[Tensor, "queries heads"],
        keys: Float[Tensor, "keys dim"],
        chosen: Int32[Tensor, "queries chosen"],
        counts: Int[np.ndarray, " queries"],
        attention: Float[Tensor, "queries chosen"],
    ) -> Float[Tensor, ""]:
        """KL(attention, softmax of the index's scores), summed over queries."""
        queries, weights, keys, chosen = _floats(queries), _floats(weights), _floats(keys), chosen.contiguous()
        losses = queries.new_empty(len(queries))
        job = _job(queries, keys, chosen, counts, 0, 1.0)
        self._loss(byref(job), *(x.data_ptr() for x in (queries, weights, keys, attention, losses)))
        return losses.sum()

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
        """`out` with the gradients of scale * index_loss_forward behind it, and that loss."""
        return _IndexLoss.apply(out, queries, weights, keys, attention, chosen, counts, scale, self)

    def index_loss_backward(
        self,
        queries: Float[Tensor, "queries heads dim"],
        weights: Float[Tensor, "queries heads"],
        keys: Float[Tensor, "keys dim"],
        chosen: Int32[Tensor, "queries chosen"],
        counts: Int[np.ndarray, " queries"],
        attention: Float[Tensor, "queries chosen"],
        scale: float,
    ) -> tuple[Float[Tensor, "queries heads dim"], Float[Tensor, "queries heads"], Float[Tensor, "keys dim"]]:
        """Gradients of queries, weights and keys of scale * index_loss, in their dtypes."""
        parts = [_floats(part) for part in (queries, weights, keys)]
        chosen = chosen.contiguous()
        grads = torch.empty_like(parts[0]), torch.empty_like(parts[1]), torch.zeros_like(parts[2])
        job = _job(parts[0], parts[2], chosen, counts, 0, scale)
        self._loss_backward(byref(job), *(x.data_ptr() for x in (*parts, attention, *grads)))
        of_queries, of_weights, of_keys = (grad.to(x.dtype) for grad, x in zip(grads, (queries, weights, keys)))
        return of_queries, of_weights, of_keys


class _Attention(torch.autograd.Function):
    """The attention, with the weights averaged over heads, if asked for."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, chosen: Tensor, counts: np.ndarray, value_dim: int, scale: float,
        has_means: bool, kernels: ChosenKernels,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        out, means = kernels.attend_forward(q, k, chosen, counts, value_dim, scale, has_means=has_means)
        ctx.save_for_backward(q, k, chosen)
        ctx.counts, ctx.scale, ctx.kernels = counts, scale, kernels
        if means is not None:
            ctx.mark_non_differentiable(means)
        return out, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, chosen = ctx.saved_tensors
        grads = ctx.kernels.attend_backward(q, k, chosen, ctx.counts, grad, ctx.scale)
        return *grads, None, None, None, None, None, None


class _IndexLoss(torch.autograd.Function):
    """Adds the gradient of the index's loss to the index only; `out` is returned unchanged."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, queries: Tensor, weights: Tensor, keys: Tensor, attention: Tensor, chosen: Tensor,
        counts: np.ndarray, scale: float, kernels: ChosenKernels,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(queries, weights, keys, attention, chosen)
        ctx.counts, ctx.scale, ctx.kernels = counts, scale, kernels
        loss = kernels.index_loss_forward(queries, weights, keys, chosen, counts, attention)
        ctx.mark_non_differentiable(loss)
        return out.view_as(out), loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        queries, weights, keys, attention, chosen = ctx.saved_tensors
        grads = ctx.kernels.index_loss_backward(queries, weights, keys, chosen, ctx.counts, attention, ctx.scale)
        return grad, *grads, None, None, None, None, None


def find_index_kernels(
    queries: Float[Tensor, "queries heads dim"],
    weights: Float[Tensor, "queries heads"],
    keys: Float[Tensor, "keys dim"],
) -> ChosenKernels | None:
    """The kernels, if they support these vectors of an index and this machine can compile them; else None."""
    return _find(queries, weights, keys, widths=(keys.shape[-1],))


def find_attention_kernels(
    q: Float[Tensor, "queries heads dim"], k: Float[Tensor, "keys dim"], value_dim: int
) -> ChosenKernels | None:
    """The kernels for an attention whose values are the first dims of k; None if it is left to torch."""
    if q.dtype is torch.bfloat16 and q.shape[1] * q.shape[2] > MAX_HALF:
        return None
    return _find(q, k, widths=(q.shape[-1], value_dim))


def _find(*tensors: Tensor, widths: tuple[int, ...]) -> ChosenKernels | None:
    """widths: those that are read by vectors. The caller checks that shapes fit together."""
    if any(width % LANES for width in widths):
        return None
    is_plain = all(t.dtype in DTYPES and t.device.type == "cpu" and type(t) in PLAIN for t in tensors)
    return _kernels() if is_plain else None


@functools.cache
def _kernels() -> ChosenKernels | None:
    return None if find_library() is None else ChosenKernels()


def _floats(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _job(q: Tensor, k: Tensor, chosen: Tensor, counts: np.ndarray, value_dim: int, scale: float) -> _Chosen:
    """The settings of a call; the caller keeps these tensors and counts (int64) alive."""
    assert len(q) == len(chosen) == len(counts) and counts.dtype == np.int64 and counts.flags.c_contiguous
    return _Chosen(
        *q.shape, value_dim, len(k), chosen.shape[1], torch.get_num_threads(), q.dtype is torch.bfloat16,
        chosen.data_ptr(), counts.ctypes.data, scale,
    )  # fmt: skip
