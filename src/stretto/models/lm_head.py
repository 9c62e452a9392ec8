"""Log-probabilities of given tokens from hidden states, without a [tokens, vocab] tensor.

Logits exist for one chunk of tokens at a time, in float32 for every dtype of the weights; the backward pass
computes them again. On a GPU one kernel reads a chunk's logits, and one makes their gradients (an add-on has them). The
engine uses `head_logits` too, so that trainer and engine round in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.models.device.kernels import find_gpu_kernels
from stretto.records.support import Support

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MASKED_LOGIT = -1e30
"""Logit of a token outside the support. Its probability is 0; it is finite so that 0 log 0 is not NaN."""
MAX_SAVED_LOGITS = 1 << 21
"""Up to this many logits (8 MiB) the forward pass saves its probabilities for the backward pass."""
_CAST_ROWS = 512
"""Rows of a 16-bit head that are cast to float32 at a time on a CPU, so that the copy fits in its caches."""


def token_logprobs(
    hidden: Float[Tensor, "tokens dim"],
    output_weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, " tokens"] | Int[Tensor, "tokens targets"],
    temperatures: Float[Tensor, " tokens"],
    chunk: int,
    *,
    entropy_grad: bool = False,
    support: Support | None = None,
    cap: float | None = None,
) -> tuple[Float[Tensor, " tokens"] | Float[Tensor, "tokens targets"], Float[Tensor, " tokens"]]:
    """Per token, log p(target) of its target, or of each of its targets, and the entropy, all float32 in nats.

    p is softmax(hidden @ output_weight.T / temperatures); cap: of `head_logits`. The entropy has a gradient only with
    entropy_grad. `chunk` tokens are computed at a time, or all if they have few logits (MAX_SAVED_LOGITS). support: the
    softmax of a token is over its support and its targets only.
    """
    return _TokenLogprobs.apply(hidden, output_weight, targets, temperatures, chunk, entropy_grad, support, cap)


def head_logits(
    hidden: Float[Tensor, "tokens dim"], output_weight: Float[Tensor, "vocab dim"], cap: float | None = None
) -> Float[Tensor, "tokens vocab"]:
    """float32 logits; 16-bit operands are summed in float32 and not rounded.

    cap: logits are cap * tanh(logits / cap), as Gemma 2 has them; None: they stay as they are.
    """
    product = hidden @ output_weight.T if hidden.dtype is torch.float32 else _WideProduct.apply(hidden, output_weight)
    return product if cap is None else (product / cap).tanh() * cap


class _WideProduct(torch.autograd.Function):
    """hidden @ weight.T of 16-bit operands in float32.

    torch.mm with out_dtype has no derivative.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        wide = hidden.float()
        out = wide.new_empty(len(hidden), len(weight))
        for ids in row_chunks(len(weight), _CAST_ROWS):
            torch.mm(wide, weight[ids].float().T, out=out[:, ids])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_hidden else None, grad.T @ hidden if needs_weight else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        chunk: int,
        entropy_grad: bool,
        support: Support | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = logprobs.new_empty(tokens)
        ctx.chunk, ctx.support, ctx.cap = chunk, support, cap
        is_plain = support is None and cap is None and targets.ndim == 1
        ctx.kernels = find_gpu_kernels() if hidden.is_cuda and is_plain else None
        if ctx.kernels is not None:
            norms = torch.empty_like(logprobs)
            for rows in row_chunks(tokens, chunk):
                found = ctx.kernels.logprobs(head_logits(hidden[rows], weight), targets[rows], temperatures[rows])
                logprobs[rows], entropy[rows], norms[rows] = found
            ctx.save_for_backward(hidden, weight, targets, temperatures, norms, entropy if entropy_grad else None)
            if not entropy_grad:
                ctx.mark_non_differentiable(entropy)
            return logprobs, entropy
        should_save = cap is None and tokens * weight.shape[0] <= MAX_SAVED_LOGITS
        ctx.chunk = max(tokens, 1) if should_save else chunk
        probs = None
        for rows in row_chunks(tokens, ctx.chunk):
            logits = _scaled_logits(hidden, weight, targets, temperatures, support, rows, cap)
            normalised = logits.sub_(torch.logsumexp(logits, dim=-1, keepdim=True))
            logprobs[rows] = normalised.gather(1, _columns(targets[rows])).view_as(logprobs[rows])
            probs = normalised.exp()
            entropy[rows] = torch.linalg.vecdot(probs, normalised).neg_()
        saved_entropy = entropy if entropy_grad else None
        ctx.save_for_backward(hidden, weight, targets, temperatures, probs if should_save else None, saved_entropy)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors[:2]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for rows in row_chunks(hidden.shape[0], ctx.chunk):
            d_logits = _logit_gradients(ctx, rows, grad, grad_entropy).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(d_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += d_logits.T @ hidden[rows]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _logit_gradients(ctx: Any, rows: slice, grad: Tensor, grad_entropy: Tensor) -> Tensor:
    """The gradients of the logits of these rows."""
    hidden, weight, all_targets, all_temperatures, saved, entropy = ctx.saved_tensors
    targets, temperatures, grad = all_targets[rows], all_temperatures[rows], grad[rows]
    if ctx.kernels is not None:
        logits = head_logits(hidden[rows], weight)
        of_entropy = None if entropy is None else (entropy[rows], grad_entropy[rows].contiguous())
        return ctx.kernels.logprob_slopes(
            logits, targets, temperatures, saved[rows], grad.contiguous(), of_entropy, hidden.dtype
        )
    probs = saved
    if probs is None:
        logits = _scaled_logits(hidden, weight, all_targets, all_temperatures, ctx.support, rows, ctx.cap)
        probs = logits.softmax(dim=-1)
    # d logprob / d logits = (onehot - p) / temperature
    scales = _columns(grad) / temperatures[:, None]
    d_logits = probs * -scales.sum(1, keepdim=True)
    d_logits.scatter_add_(1, _columns(targets), scales)
    if entropy is not None:
        # d entropy / d logits = -p (log p + entropy) / temperature, which is 0 where p is 0
        scale = grad_entropy[rows] / temperatures
        slope = torch.special.entr(probs).sub_(probs * entropy[rows, None])
        d_logits += slope.mul_(scale[:, None])
    if ctx.cap is not None:
        # d (cap tanh(z / cap)) / d z = 1 - tanh^2; where the support masks a logit its gradient is 0
        slope = (logits * temperatures[:, None] / ctx.cap).clamp_(-1, 1).square_()
        d_logits *= 1 - slope
    return d_logits


def _scaled_logits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    support: Support | None,
    rows: slice,
    cap: float | None,
) -> Tensor:
    """float32 logits over their temperatures; MASKED_LOGIT outside the support."""
    logits = head_logits(hidden[rows], weight, cap).div_(temperatures[rows, None])
    if support is None:
        return logits
    part = support.part(rows.start, rows.stop)
    if not part.sizes.any():
        return logits
    owners = torch.from_numpy(np.repeat(np.arange(len(part)), part.sizes)).to(logits.device)
    ids = torch.from_numpy(part.ids.astype(np.int64)).to(logits.device)
    is_cut = torch.from_numpy(part.sizes > 0).to(logits.device)[:, None].repeat(1, logits.shape[1])
    is_cut[owners, ids] = False
    is_cut.scatter_(1, _columns(targets[rows]), False)
    return logits.masked_fill_(is_cut, MASKED_LOGIT)


def _columns(values: Tensor) -> Tensor:
    """[tokens] as [tokens, 1]; several columns as they are."""
    return values[:, None] if values.ndim == 1 else values


def row_chunks(tokens: int, chunk: int) -> list[slice]:
    """Slices of so many rows that follow one another, the last one shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
