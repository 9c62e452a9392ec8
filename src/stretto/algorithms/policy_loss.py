"""Losses of one token under the policy gradient, before weights and normalisation (losses.py).

In: log-probabilities of the sampled tokens under the trained policy (with gradient) and under the policy
that sampled them, both at the sampling temperature, and advantages. Out: a loss a token, and which tokens
were dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3


class PolicyLoss(NamedTuple):
    """A loss a token, and the tokens dropped for having moved too far down or up."""

    loss: Float[Tensor, " tokens"]
    is_dropped_low: Bool[Tensor, " tokens"]
    is_dropped_high: Bool[Tensor, " tokens"]


def dppo_kl(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    mask_low: float,
    mask_high: float,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> PolicyLoss:
    """Importance-weighted REINFORCE inside a trust region, plus a squared log ratio to the sampler.

    -keep * adv_tau * A * r + kl_tau * (log r)^2 with r = p / q, p the trained policy, q the sampler.
    A token is dropped (keep = 0) when its probability has already moved by more than a bound the way its
    advantage pushes it: p - q > mask_high for A > 0, p - q < -mask_low for A <= 0. The squared log ratio
    holds dropped tokens too. r is neither clamped nor detached: the gradient is A * r * grad log p.

    Source: DPPO with binary total variation, arXiv:2602.04879; KL term of Kimi K2.5, arXiv:2602.02276.
    Differs: the KL term is to the sampler, not to a reference policy.
    """
    log_ratio = logprobs - behavior_logprobs
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    is_positive = advantages > 0
    dropped_high = is_positive & (moved > mask_high)
    dropped_low = ~is_positive & (moved < -mask_low)
    pushed = (adv_tau * advantages).masked_fill(dropped_high | dropped_low, 0.0)
    loss = kl_tau * log_ratio.square() - pushed * log_ratio.exp()
    return PolicyLoss(loss, dropped_low, dropped_high)


def ref_kl(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    ref_logprobs: Float[Tensor, " tokens"],
) -> PolicyLoss:
    """Distillation towards a reference: its log ratio to the policy is the advantage; one-sided mask.

    -keep * sg(log p_ref - log p) * r + 1e-3 * (log r)^2, keep = (p - q >= -0.2).

    Source: on-policy distillation as policy gradient, arXiv:2306.13649 section 3 (reverse KL on own
    samples); mask and KL term as in dppo_kl. Differs: tokens are dropped only when they fell, whatever the
    sign of their advantage.
    """
    log_ratio = logprobs - behavior_logprobs
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    dropped_low = moved < -REF_KL_MASK_LOW
    pushed = (ref_logprobs - logprobs.detach()).masked_fill(dropped_low, 0.0)
    loss = REF_KL_TAU * log_ratio.square() - pushed * log_ratio.exp()
    return PolicyLoss(loss, dropped_low, dropped_low.new_zeros(dropped_low.shape))
