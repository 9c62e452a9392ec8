"""Policy losses per token, before weights and normalisation (losses.py).

In: log-probabilities of the sampled tokens under the trained policy (with gradient) and under the policy that sampled
them, both at the sampling temperature, and advantages. Out: a loss per token, and which tokens were dropped.

With r = p / q, p the trained policy and q the sampler, the losses are `dppo_kl` and `ipo` (drop tokens that moved too
far), `ppo` (clip r), `gspo` (clip one r per sample), `cispo` (clip r as a constant weight) and `reinforce` (no r). If
a step makes several updates, q may also be the policy before the step: losses.py decides what it passes as
behavior_logprobs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stretto.algorithms.kl import MAX_LOG_RATIO
from stretto.algorithms.sample_index import SampleIndex

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3
SMALLEST_REST = 1e-6
"""Least probability of all tokens beside the alternatives: 1 minus their sum is rounded to about 1e-7."""


class PolicyLoss(NamedTuple):
    """A loss per token, and the tokens dropped (cispo: clipped) as too far down or up."""

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
    """Importance-weighted REINFORCE in a trust region, plus a squared log ratio to the sampler.

    -keep * adv_tau * A * r + kl_tau * (log r)^2 with r = p / q, p the trained policy, q the sampler.
    A token is dropped (keep = 0) if its probability has already moved too far in the direction of its advantage:
    p - q > mask_high for A > 0, p - q < -mask_low for A <= 0. The squared log ratio applies to dropped tokens too.
    r is not detached: the gradient is A * r * grad log p.

    Source: DPPO with binary total variation, arXiv:2602.04879; KL term of Kimi K2.5, arXiv:2602.02276.
    Differs: the KL term is to the sampler, not to a reference policy, and 0 up to |log r| = 0.001 (`_squared`, also in
    `ipo`); in r, log r is clamped at 20 (also in `ipo` and `ref_kl`).
    """
    log_ratio = logprobs - behavior_logprobs
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    is_positive = advantages > 0
    dropped_high = is_positive & (moved > mask_high)
    dropped_low = ~is_positive & (moved < -mask_low)
    pushed = (adv_tau * advantages).masked_fill(dropped_high | dropped_low, 0.0)
    loss = kl_tau * _squared(log_ratio) - pushed * _ratio(log_ratio)
    return PolicyLoss(loss, dropped_low, dropped_high)


def ipo(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    threshold: float,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> PolicyLoss:
    """As dppo_kl, but a token is dropped when |p - q| > threshold, whatever its advantage.

    -keep * adv_tau * A * r + kl_tau * (log r)^2

    Source: the `ipo` loss of prime-rl 0.8. Differs: nothing; tokens that fell and that rose are counted separately.
    """
    log_ratio = logprobs - behavior_logprobs
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    dropped_high, dropped_low = moved > threshold, moved < -threshold
    pushed = (adv_tau * advantages).masked_fill(dropped_high | dropped_low, 0.0)
    loss = kl_tau * _squared(log_ratio) - pushed * _ratio(log_ratio)
    return PolicyLoss(loss, dropped_low, dropped_high)


def ppo(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate per token: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    With clip_dual = c and A < 0 it is at most -c A. A clipped token has no gradient.

    Source: PPO, arXiv:1707.06347, eq. 7; clip-higher of DAPO, arXiv:2503.14476, eq. 8; dual clip,
    arXiv:1912.09729, eq. 5. Differs: r is to the sampler unless use_rollout_logprobs is false.
    """
    return _clipped(_ratio(logprobs - behavior_logprobs), advantages, clip_low, clip_high, clip_dual)


def gspo(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    sample_index: SampleIndex,
    is_member: Bool[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's surrogate on s = exp(mean log r over a sample's members), one s per sample.

    The gradient goes through the mean. With the `sample` reduction each sample counts once.

    Source: GSPO, arXiv:2507.18071, eq. 5-7. Differs: a sample is one branch of a rollout.
    """
    mean = sample_index.mean(logprobs - behavior_logprobs, is_member)
    return _clipped(sample_index.spread(_ratio(mean)), advantages, clip_low, clip_high, None)


def cispo(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    clip_low: float | None,
    clip_high: float,
) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p: every token keeps a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4-5; the default bound of 5 as in ScaleRL, arXiv:2510.13786.
    """
    ratio = _ratio((logprobs - behavior_logprobs).detach())
    low = 0.0 if clip_low is None else 1 - clip_low
    weights = ratio.clamp(low, 1 + clip_high)
    return PolicyLoss(-weights * advantages * logprobs, ratio < low, ratio > 1 + clip_high)


def reinforce(logprobs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> PolicyLoss:
    """-A log p: the policy gradient of on-policy tokens; correction.py weights others.

    Source: Williams, Machine Learning 8, 1992, eq. 4.
    """
    nothing = logprobs.new_zeros(logprobs.shape, dtype=torch.bool)
    return PolicyLoss(-advantages * logprobs, nothing, nothing)


NOISE = 1e-3
"""Log ratios (nats) up to this are what engine and trainer round differently."""


def _squared(log_ratio: Tensor) -> Tensor:
    """(log r)^2, and 0 with no gradient where log r is noise: Adam makes full steps of any gradient that is alone."""
    return log_ratio.masked_fill(log_ratio.detach().abs() <= NOISE, 0.0).square()


class AlternativeTokens(NamedTuple):
    """What teachers hold for likeliest at each token; tokens whose weights are 0 have none."""

    ids: Int[Tensor, "tokens teachers alternatives"]
    """-1: none."""
    logprobs: Float[Tensor, "tokens teachers alternatives"]
    weights: Float[Tensor, "tokens teachers"]
    is_forward: Bool[Tensor, " tokens"]


def alternatives_kl(
    logprobs: Float[Tensor, "tokens flattened"], teachers: AlternativeTokens
) -> Float[Tensor, " tokens"]:
    """Distillation on several tokens per position: the divergence to a teacher, with all other tokens as one.

    With p the policy's and t the teacher's probabilities of a teacher's alternatives and of the rest, which is 1 minus
    their sum, it is sum p log(p / t), or sum t log(t / p) where it is forward; over teachers, the weighted mean. It has
    a gradient without samples, is never negative, and is 0 where p = t: where each alternative's log-probability
    differs by less than what engine and trainer round differently (0.001), its gradient is 0 too.

    logprobs: the policy's, of `teachers.ids`, teacher after teacher. Source: generalised knowledge distillation,
    arXiv:2306.13649 section 3, for the distribution over these tokens and the rest.
    """
    is_none = teachers.ids < 0
    log_p = logprobs.view_as(teachers.logprobs)
    p, t = (each.exp().masked_fill(is_none, 0.0) for each in (log_p, teachers.logprobs))
    rest_p, rest_t = ((1 - each.sum(-1)).clamp(min=SMALLEST_REST) for each in (p, t))
    gap, rest_gap = log_p - teachers.logprobs, rest_p.log() - rest_t.log()
    reverse = (p * gap).sum(-1) + rest_p * rest_gap
    forward = -(t * gap).sum(-1) - rest_t * rest_gap
    divergence = torch.where(teachers.is_forward[:, None], forward, reverse)
    is_equal = (gap.detach().abs() <= NOISE).logical_or(is_none).all(-1)
    return (divergence.masked_fill(is_equal, 0.0) * teachers.weights).sum(-1)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None
) -> PolicyLoss:
    """PPO's surrogate: r is clipped above for A > 0, below (and by the dual clip) for A < 0."""
    is_positive = advantages > 0
    highest = torch.full_like(ratio, clip_dual or math.inf).masked_fill(is_positive, 1 + clip_high)
    lowest = torch.full_like(ratio, 1 - clip_low).masked_fill(is_positive, 0.0)
    detached, is_pushed = ratio.detach(), advantages != 0
    return PolicyLoss(
        -advantages * ratio.clamp(lowest, highest), is_pushed & (detached < lowest), is_pushed & (detached > highest)
    )


def ref_kl(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    ref_logprobs: Float[Tensor, " tokens"],
) -> PolicyLoss:
    """Distillation: the log ratio of reference to policy is the advantage; one-sided mask.

    -keep * sg(log p_ref - log p) * r + 1e-3 * (log r)^2, keep = (p - q >= -0.2).

    Source: on-policy distillation as policy gradient, arXiv:2306.13649 section 3 (reverse KL on own
    samples); mask and KL term as in dppo_kl. Differs: tokens are dropped only when they fell, whatever the
    sign of their advantage; an advantage up to 0.001 is 0, so that a policy that equals its teacher stays where it is.
    """
    log_ratio = logprobs - behavior_logprobs
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    dropped_low = moved < -REF_KL_MASK_LOW
    gap = ref_logprobs - logprobs.detach()
    pushed = gap.masked_fill(dropped_low | (gap.abs() <= NOISE), 0.0)
    loss = REF_KL_TAU * _squared(log_ratio) - pushed * _ratio(log_ratio)
    return PolicyLoss(loss, dropped_low, dropped_low.new_zeros(dropped_low.shape))
