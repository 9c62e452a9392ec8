"""The operations of a training step between its matrix products on a GPU, each as one kernel of triton.

The methods are those of `RowKernels` (models/device/kernels.py), and two for the head (lm_head.py). Sums are float32
for every dtype. Results are rounded where torch's operations round them, so that a 16-bit trainer stays as close to its
engine; what only a gradient needs is rounded once, at its end. The slow reference is torch's operations.
Import this module only if triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# What triton compiles has no types of Python.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_TILE = 4096
"""Numbers that a program has in its registers at a time."""
_MAX_PROGRAMS = 1024
"""Programs among which the rows of a norm's backward pass are divided; each has a part of the weight's gradient."""


@triton.jit
def _rms_norm(
    x, weight, out, inverses, num_rows, dim, eps,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    places = rows.to(tl.int64)[:, None] * dim + columns[None, :]
    values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(values * values, axis=1) / dim + eps)
    normed = (values * inverse[:, None]).to(out.dtype.element_ty)
    if HAS_WEIGHT:
        scale = tl.load(weight + columns, mask=columns < dim, other=0.0)
        normed = (normed.to(tl.float32) * scale.to(tl.float32)[None, :]).to(out.dtype.element_ty)
    tl.store(out + places, normed, mask=mask)
    tl.store(inverses + rows, inverse, mask=rows < num_rows)


@triton.jit
def _rms_norm_backward(
    x, weight, inverses, grad, grad_x, grad_weight, num_rows, dim, rows_each,
    HAS_WEIGHT: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The gradients of `rows_each` rows, and the part of the weight's gradient that is theirs."""
    part, columns = tl.program_id(0), tl.arange(0, DIM)
    scale = tl.full((DIM,), 1.0, tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
    total = tl.zeros((DIM,), tl.float32)
    first = part * rows_each
    for start in range(0, rows_each, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        is_mine = (start + tl.arange(0, ROWS) < rows_each) & (rows < num_rows)
        mask = is_mine[:, None] & (columns < dim)[None, :]
        places = rows.to(tl.int64)[:, None] * dim + columns[None, :]
        inverse = tl.load(inverses + rows, mask=is_mine, other=0.0)
        normed = tl.load(x + places, mask=mask, other=0.0).to(tl.float32) * inverse[:, None]
        slope = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_WEIGHT:
            total += tl.sum(slope * normed.to(x.dtype.element_ty).to(tl.float32), axis=0)
        if NEEDS_X:
            scaled = slope * scale[None, :]
            mean = tl.sum(scaled * normed, axis=1) / dim
            found = (scaled - normed * mean[:, None]) * inverse[:, None]
            tl.store(grad_x + places, found.to(grad_x.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        tl.store(grad_weight + part.to(tl.int64) * dim + columns, total, mask=columns < dim)


@triton.jit
def _gate_product(gate, up, out, size, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = places < size
    opened = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    opened = (opened / (1 + tl.exp(-opened))).to(out.dtype.element_ty).to(tl.float32)
    values = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, (opened * values).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_product_backward(gate, up, grad, grad_gate, grad_up, size, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = places < size
    value = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-value))
    by_up = slope * tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    by_gate = by_up * share * (1 + value * (1 - share))
    tl.store(grad_gate + places, by_gate.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + places, (slope * value * share).to(grad_up.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(x, cos, sin, out, heads, dim, sign, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Rotate all heads of one token."""
    token, nth, columns = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, DIM)
    half = dim // 2
    swapped = tl.where(columns < half, columns + half, columns - half)
    mask = (nth < heads)[:, None] & (columns < dim)[None, :]
    row = token * heads * dim + nth[:, None] * dim
    at = token * dim + columns
    turn = tl.load(cos + at, mask=columns < dim, other=0.0).to(tl.float32)
    shift = tl.load(sin + at, mask=columns < dim, other=0.0).to(tl.float32) * sign
    own = tl.load(x + row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + row + swapped[None, :], mask=mask, other=0.0).to(tl.float32)
    kept = (own * turn[None, :]).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + columns[None, :], (kept + other * shift[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _logprobs(logits, targets, temperatures, logprobs, entropies, norms, vocab, TILE: tl.constexpr):
    """One row: log p(target), the entropy, and the logarithm of the sum of exp(logit / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, start = tl.load(temperatures + row), row * vocab
    # Each column of the tiles has its largest logit, the sum of exp(logit - largest), and the sum of the products of
    # that with logit - largest. The largest is finite, because no exp(inf - inf) may be taken.
    columns = tl.arange(0, TILE)
    largest = tl.full((TILE,), -1e38, tl.float32)
    total, weighted = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for low in range(0, vocab, TILE):
        mask = low + columns < vocab
        values = tl.load(logits + start + low + columns, mask=mask, other=0.0) / temperature
        values = tl.where(mask, values, -1e38)
        higher = tl.maximum(largest, values)
        kept, new = tl.exp(largest - higher), tl.where(mask, tl.exp(values - higher), 0.0)
        weighted = kept * (weighted + (largest - higher) * total) + new * (values - higher)
        total, largest = kept * total + new, higher
    top = tl.max(largest, axis=0)
    kept = tl.exp(largest - top)
    weighted = tl.sum(kept * (weighted + (largest - top) * total), axis=0)
    total = tl.sum(kept * total, axis=0)
    norm = top + tl.log(total)
    target = tl.load(logits + start + tl.load(targets + row)) / temperature
    tl.store(logprobs + row, target - norm)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(norms + row, norm)


@triton.jit
def _logprob_slopes(
    logits, targets, temperatures, norms, entropies, grads, entropy_grads, slopes, vocab,
    HAS_ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """d (grad * logprob + entropy_grad * entropy) / d logits of one tile of a row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask, places = columns < vocab, row * vocab + columns
    temperature = tl.load(temperatures + row)
    logprob = tl.load(logits + places, mask=mask, other=0.0) / temperature - tl.load(norms + row)
    prob, scale = tl.exp(logprob), tl.load(grads + row) / temperature
    slope = tl.where(columns == tl.load(targets + row), scale, 0.0) - prob * scale
    if HAS_ENTROPY:
        slope -= prob * (logprob + tl.load(entropies + row)) * (tl.load(entropy_grads + row) / temperature)
    tl.store(slopes + places, slope.to(slopes.dtype.element_ty), mask=mask)


class GpuKernels:
    """The kernels above, called with tensors."""

    def rms_norm(
        self, x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"] | None, eps: float
    ) -> tuple[Float[Tensor, "*rows dim"], Float[Tensor, " *rows"]]:
        """x / rms(x), rounded, times weight; and 1 / rms(x) of every row, float32."""
        x, dim = x.contiguous(), x.shape[-1]
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        rows, width = _tile(dim)
        if inverse.numel():
            _rms_norm[(triton.cdiv(inverse.numel(), rows),)](
                x, x if weight is None else weight, out, inverse, inverse.numel(), dim, eps,
                HAS_WEIGHT=weight is not None, ROWS=rows, DIM=width,
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
        x, grad, dim, num_rows = x.contiguous(), grad.contiguous(), x.shape[-1], inverse.numel()
        rows, width = _tile(dim)
        rows_each = max(triton.cdiv(num_rows, _MAX_PROGRAMS), 1)
        rows_each = triton.cdiv(rows_each, rows) * rows
        num_parts = triton.cdiv(num_rows, rows_each)
        grad_x = torch.empty_like(x) if needed[0] else None
        parts = x.new_empty((num_parts, dim), dtype=torch.float32) if needed[1] else None
        if num_parts:
            _rms_norm_backward[(num_parts,)](
                x, x if weight is None else weight, inverse, grad, x if grad_x is None else grad_x,
                inverse if parts is None else parts, num_rows, dim, rows_each,
                HAS_WEIGHT=weight is not None, NEEDS_X=needed[0], NEEDS_WEIGHT=needed[1], ROWS=rows, DIM=width,
            )  # fmt: skip
        return grad_x, None if parts is None or weight is None else parts.sum(0).to(weight.dtype)

    def gate_product(self, gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """silu(gate), rounded, times up."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        if out.numel():
            _gate_product[(triton.cdiv(out.numel(), _TILE),)](gate, up, out, out.numel(), TILE=_TILE)
        return out

    def gate_product_backward(
        self, gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"], grad: Float[Tensor, "rows dim"]
    ) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "rows dim"]]:
        """Gradients of gate and up."""
        gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
        by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
        if grad.numel():
            grid = (triton.cdiv(grad.numel(), _TILE),)
            _gate_product_backward[grid](gate, up, grad, by_gate, by_up, grad.numel(), TILE=_TILE)
        return by_gate, by_up

    def rotate(
        self,
        x: Float[Tensor, "tokens heads dim"],
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        sign: int,
    ) -> Float[Tensor, "tokens heads dim"]:
        """x * cos, rounded, + sign * swapped(x) * sin, where the halves of every head are swapped."""
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out, (tokens, heads, dim) = torch.empty_like(x), x.shape
        if out.numel():
            sizes = {"HEADS": triton.next_power_of_2(heads), "DIM": triton.next_power_of_2(dim)}
            _rotate[(tokens,)](x, cos, sin, out, heads, dim, float(sign), **sizes)
        return out

    def logprobs(
        self,
        logits: Float[Tensor, "tokens vocab"],
        targets: Int[Tensor, " tokens"],
        temperatures: Float[Tensor, " tokens"],
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        """log p(target), the entropy and log sum exp of softmax(logits / temperatures). logits: float32."""
        found = [torch.empty_like(temperatures) for _ in range(3)]
        if len(logits):
            _logprobs[(len(logits),)](logits, targets, temperatures, *found, logits.shape[1], TILE=_TILE, num_warps=8)
        return found[0], found[1], found[2]

    def logprob_slopes(
        self,
        logits: Float[Tensor, "tokens vocab"],
        targets: Int[Tensor, " tokens"],
        temperatures: Float[Tensor, " tokens"],
        norms: Float[Tensor, " tokens"],
        grads: Float[Tensor, " tokens"],
        entropy: tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "tokens vocab"]:
        """The gradient of `logits` in `dtype`; norms: the third result of `logprobs`.

        grads: of the log-probabilities. entropy: the entropies and their gradients; None: without them.
        """
        vocab = logits.shape[1]
        slopes = torch.empty_like(logits, dtype=dtype)
        entropies, entropy_grads = entropy or (norms, norms)
        if len(logits):
            _logprob_slopes[(len(logits), triton.cdiv(vocab, _TILE))](
                logits, targets, temperatures, norms, entropies, grads, entropy_grads, slopes, vocab,
                HAS_ENTROPY=entropy is not None, TILE=_TILE,
            )  # fmt: skip
        return slopes


def _tile(dim: int) -> tuple[int, int]:
    """How many rows of `dim` numbers a program has at a time, and the numbers that it has for each."""
    width = triton.next_power_of_2(dim)
    return max(_TILE // width, 1), width
