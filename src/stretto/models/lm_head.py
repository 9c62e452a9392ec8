"""From hidden states to log-probabilities of given tokens without ever holding [tokens, vocab].

Logits exist for one chunk of tokens at a time, in float32 whatever the weights' type; the backward pass
computes them again. The engine uses `head_logits` too, so that trainer and engine round alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SAVED_LOGITS = 1 << 21
"""Up to so many logits (8 MiB) the forward pass keeps its probabilities instead of computing them twice."""


def token_logprobs(
    hidden: Float[Tensor, "tokens dim"],
    output_weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, " tokens"],
    temperatures: Float[Tensor, " tokens"],
    chunk: int,
    *,
    entropy_grad: bool = False,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """log p(targets) under softmax(hidden @ output_weight.T / temperatures), and the entropy, token by token.

    Both in nats and float32; the entropy carries a gradient only with entropy_grad. `chunk` tokens are done
    at a time unless the logits of all of them are few (SAVED_LOGITS).
    """
    return _TokenLogprobs.apply(hidden, output_weight, targets, temperatures, chunk, entropy_grad)


def head_logits(
    hidden: Float[Tensor, "tokens dim"], output_weight: Float[Tensor, "vocab dim"]
) -> Float[Tensor, "tokens vocab"]:
    """float32 logits; those of bfloat16 operands are summed in float32 and never rounded to bfloat16."""
    if hidden.dtype is torch.float32:
        return hidden @ output_weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, output_weight.T, out_dtype=torch.float32)
    return hidden.float() @ output_weight.float().T


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
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprobs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        keep = tokens * weight.shape[0] <= SAVED_LOGITS
        chunk = max(tokens, 1) if keep else chunk
        probs = None
        for rows in _chunks(tokens, chunk):
            logits = head_logits(hidden[rows], weight).div_(temperatures[rows, None])
            normalised = logits.sub_(torch.logsumexp(logits, dim=-1, keepdim=True))
            logprobs[rows] = normalised.gather(1, targets[rows, None]).squeeze(1)
            probs = normalised.exp()
            entropy[rows] = torch.linalg.vecdot(probs, normalised).neg_()
        ctx.chunk = chunk
        saved_entropy = entropy if entropy_grad else None
        ctx.save_for_backward(hidden, weight, targets, temperatures, probs if keep else None, saved_entropy)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, kept, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for rows in _chunks(hidden.shape[0], ctx.chunk):
            if kept is None:
                probs = head_logits(hidden[rows], weight).div_(temperatures[rows, None]).softmax(dim=-1)
            else:
                probs = kept
            # d logprob / d logits = (onehot - p) / temperature
            scale = grad[rows] / temperatures[rows]
            d_logits = probs * -scale[:, None]
            d_logits.scatter_add_(1, targets[rows, None], scale[:, None])
            if entropy is not None:
                # d entropy / d logits = -p (log p + entropy) / temperature, 0 where p is
                scale = grad_entropy[rows] / temperatures[rows]
                slope = torch.special.entr(probs).sub_(probs * entropy[rows, None])
                d_logits += slope.mul_(scale[:, None])
            d_logits = d_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(d_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += d_logits.T @ hidden[rows]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
