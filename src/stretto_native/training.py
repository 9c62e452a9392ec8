"""The operations of a training step between its matrix products, each as one call.

Forward and backward, for float32 on a CPU. torch computes each of them in several operations, each of which reads and
writes memory again.
"""

from __future__ import annotations

import functools
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.models.device.kernels import PLAIN
from stretto.models.segments import SegmentTree
from stretto_native.library import LANES, declare, find_library

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


MAX_KEYS = 512
"""Rows with longer segments are left to torch, unless it would copy their keys many times: these kernels pad nothing,
and skip the half that causality hides."""


class Segments(Structure):
    """`Segments` in training.c: segment i is rows starts[i]:ends[i] and sees runs[i]:runs[i + 1], its own the last."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "head_dim", "segments", "longest", "threads")),
        *((name, c_void_p) for name in ("starts", "ends", "prefixes", "runs", "run_starts", "run_ends")),
        ("scale", c_float),
    )


class TrainingKernels:
    """The functions of training.c: `RowKernels`, and attention."""

    def __init__(self) -> None:
        library = find_library()
        assert library is not None
        self._norm = declare(library.rms_norm_forward, "ppppllfi")
        self._norm_backward = declare(library.rms_norm_backward, "pppppplli")
        self._gate = declare(library.gate_product_forward, "pppli")
        self._gate_backward = declare(library.gate_product_backward, "pppppli")
        self._rotate = declare(library.rotate, "pppplllfi")
        self.attend = declare(library.attention_forward, "pppppp")
        self.attend_backward = declare(library.attention_backward, "ppppppppp")

    def rms_norm(
        self, x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"] | None, eps: float
    ) -> tuple[Float[Tensor, "*rows dim"], Float[Tensor, " *rows"]]:
        """x / rms(x) * weight, and 1 / rms(x) of every row."""
        x, weight, dim = x.contiguous(), _contiguous(weight), x.shape[-1]
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        self._norm(
            x.data_ptr(), _pointer(weight), out.data_ptr(), inverse.data_ptr(), inverse.numel(), dim, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out, inverse

    def rms_norm_backward(
        self,
        x: Float[Tensor, "*rows dim"],
        weight: Float[Tensor, " dim"] | None,
        inverse: Float[Tensor, " *rows"],
        grad: Float[Tensor, "*rows dim"],
        needed: tuple[bool, bool],
    ) -> tuple[Float[Tensor, "*rows dim"] | None, Float[Tensor, " dim"] | None]:
        """Gradients of x and weight, where needed; `inverse` is the second result of rms_norm."""
        x, grad, threads = x.contiguous(), grad.contiguous(), torch.get_num_threads()
        weight = _contiguous(weight)
        grad_x = torch.empty_like(x) if needed[0] else None
        grad_weight = x.new_zeros(threads, x.shape[-1]) if needed[1] else None
        self._norm_backward(
            x.data_ptr(), _pointer(weight), inverse.data_ptr(), grad.data_ptr(), _pointer(grad_x),
            _pointer(grad_weight), inverse.numel(), x.shape[-1], threads,
        )  # fmt: skip
        return grad_x, None if grad_weight is None else grad_weight.sum(0)

    def gate_product(self, gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """silu(gate) * up."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        self._gate(gate.data_ptr(), up.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())
        return out

    def gate_product_backward(
        self, gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"], grad: Float[Tensor, "rows dim"]
    ) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "rows dim"]]:
        """Gradients of gate and up."""
        gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
        grads = torch.empty_like(gate), torch.empty_like(up)
        tensors = (x.data_ptr() for x in (gate, up, grad, *grads))
        self._gate_backward(*tensors, grad.numel(), torch.get_num_threads())
        return grads

    def rotate(
        self,
        x: Float[Tensor, "tokens heads dim"],
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        sign: int,
    ) -> Float[Tensor, "tokens heads dim"]:
        """x * cos + sign * swapped(x) * sin, where the halves of every head are swapped."""
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty_like(x)
        tensors = (t.data_ptr() for t in (x, cos, sin, out))
        self._rotate(*tensors, *x.shape, sign, torch.get_num_threads())
        return out


class NativeAttention:
    """Causal attention within segments, each of which may continue others; it reads keys where they are."""

    def __init__(self, tree: SegmentTree, *, is_any_length: bool = True) -> None:
        """is_any_length: also of segments in which a token sees more than MAX_KEYS keys."""
        chosen = np.flatnonzero(tree.lengths)
        self.starts, self.ends = tree.bounds[:-1][chosen], tree.bounds[1:][chosen]
        self.prefixes = tree.prefixes[chosen]
        seen = [(*tree.ancestors[segment], segment) for segment in chosen.tolist()]
        self.runs = np.cumsum([0, *map(len, seen)], dtype=np.int64)
        runs = np.fromiter(chain.from_iterable(seen), np.int64, count=self.runs[-1])
        self.run_starts, self.run_ends = tree.bounds[:-1][runs], tree.bounds[1:][runs]
        self.longest = tree.longest
        self.is_meant = is_any_length or 0 < tree.longest <= MAX_KEYS
        self.num_rows = int(tree.bounds[-1])

    def fits(self, q: Float[Tensor, "*_"], k: Float[Tensor, "*_"], v: Float[Tensor, "*_"]) -> bool:
        """True if shapes are as the kernels need them, which do not check that: q as k and v, but for more heads."""
        (rows, heads, dim), kv_heads = q.shape, k.shape[1]
        is_same = k.shape == v.shape == (rows, kv_heads, dim)
        return is_same and rows == self.num_rows and heads % kv_heads == 0

    def __call__(
        self, q: Float[Tensor, "rows heads dim"], k: Float[Tensor, "rows _ _"], v: Float[Tensor, "rows _ _"]
    ) -> Float[Tensor, "rows heads dim"] | None:
        """None for what is left to torch, which also says if heads do not fit together."""
        if not self.is_meant or not self.fits(q, k, v) or (kernels := find_row_kernels(q, k, v)) is None:
            return None
        return _Attention.apply(q.contiguous(), k.contiguous(), v.contiguous(), self, kernels)

    def segments(self, q: Float[Tensor, "rows heads dim"], k: Float[Tensor, "rows kv_heads dim"]) -> Segments:
        """These segments for q [rows, heads, dim] and k [rows, kv heads, dim]."""
        (rows, heads, dim), kv_heads = q.shape, k.shape[1]
        assert rows == self.num_rows and heads % kv_heads == 0
        arrays = (self.starts, self.ends, self.prefixes, self.runs, self.run_starts, self.run_ends)
        return Segments(
            rows, heads, kv_heads, dim, len(self.starts), self.longest, torch.get_num_threads(),
            *(array.ctypes.data for array in arrays), dim**-0.5,
        )  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: NativeAttention, kernels: TrainingKernels
    ) -> Tensor:
        out, norms = torch.empty_like(q), q.new_empty(q.shape[:2])
        tensors = (t.data_ptr() for t in (q, k, v, out, norms))
        kernels.attend(byref(attention.segments(q, k)), *tensors)
        ctx.save_for_backward(q, k, v, norms)
        ctx.attention, ctx.kernels = attention, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, norms = ctx.saved_tensors
        grad = grad.contiguous()
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        tensors = (t.data_ptr() for t in (q, k, v, norms, grad, *grads))
        ctx.kernels.attend_backward(byref(ctx.attention.segments(q, k)), *tensors)
        return *grads, None, None


def find_row_kernels(x: Shaped[Tensor, "*_"], *others: Shaped[Tensor, "*_"] | None) -> TrainingKernels | None:
    """The kernels, if they support these tensors and this machine can compile them; else None.

    The caller checks that the shapes fit together.
    """
    if x.shape[-1] % LANES or torch.compiler.is_compiling():
        return None
    if all(t is None or _is_plain(t) for t in (x, *others)):
        return _kernels()
    return None


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu" and type(x) in PLAIN


@functools.cache
def _kernels() -> TrainingKernels | None:
    return None if find_library() is None else TrainingKernels()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
