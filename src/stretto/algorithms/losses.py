"""The loss of a step: a sum of components over tokens, each divided by its own global token count.

    L = sum_rl l*w / N_rl  +  sum_ce l*w / N_ce  +  sum_ref_kl l*w / N_ref_kl

N counts the tokens of non-zero weight over all ranks and micro batches (at least 1), so a step does not
depend on how the batch was cut, and weights scale the numerator only. Components may overlap on a token.
Here are membership, counts, and the sum for one micro batch; the losses of single tokens stand in
policy_loss.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stretto.algorithms import kl
from stretto.algorithms.policy_loss import dppo_kl, ref_kl
from stretto.config.trainer import DefaultLoss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class TokenCounts(NamedTuple):
    """Tokens of non-zero weight in each component."""

    rl: float
    ce: float
    ref_kl: float


@dataclass(frozen=True)
class TokenStreams:
    """What is known about each trained token besides its log-probability; None: no such component.

    A component's weight is 0 on tokens outside it. `is_sampled` marks the tokens that behavior_logprobs
    hold for.
    """

    is_sampled: Bool[Tensor, " tokens"]
    behavior_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    rl_weights: Float[Tensor, " tokens"] | None = None
    ce_weights: Float[Tensor, " tokens"] | None = None
    ref_kl_weights: Float[Tensor, " tokens"] | None = None
    ref_logprobs: Float[Tensor, " tokens"] | None = None


def total_loss(
    logprobs: Float[Tensor, " tokens"], streams: TokenStreams, counts: TokenCounts, cfg: DefaultLoss
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """This micro batch's share of the step's loss, and detached sums for metrics.

    Shares of all micro batches (and ranks) add up to L. The sums are unweighted counts or totals over
    tokens; `max/` entries are maxima.
    """
    loss = logprobs.new_zeros(())
    sums: dict[str, Tensor] = {}
    if streams.rl_weights is not None:
        policy = dppo_kl(
            logprobs,
            streams.behavior_logprobs,
            streams.advantages,
            mask_low=cfg.dppo_mask_low,
            mask_high=cfg.dppo_mask_high,
            adv_tau=cfg.adv_tau,
            kl_tau=cfg.kl_tau,
        )
        loss = loss + weighted_sum(policy.loss, streams.rl_weights) / max(counts.rl, 1)
        is_member = streams.rl_weights != 0
        sums["is_masked_low"] = (policy.is_dropped_low & is_member).sum()
        sums["is_masked_high"] = (policy.is_dropped_high & is_member).sum()
        sums["rl_tokens"] = is_member.sum()
    if streams.ce_weights is not None:
        loss = loss - weighted_sum(logprobs, streams.ce_weights) / max(counts.ce, 1)
        is_member = streams.ce_weights != 0
        sums["nll"] = -weighted_sum(logprobs.detach(), is_member.float())
        sums["ce_tokens"] = is_member.sum()
    if streams.ref_kl_weights is not None:
        assert streams.ref_logprobs is not None, "ref_kl weights without ref_logprobs"
        distilled = ref_kl(logprobs, streams.behavior_logprobs, streams.ref_logprobs)
        loss = loss + weighted_sum(distilled.loss, streams.ref_kl_weights) / max(counts.ref_kl, 1)
    with torch.no_grad():
        log_ratio = (logprobs - streams.behavior_logprobs).masked_fill(~streams.is_sampled, 0.0)
        mismatch = kl.k3(log_ratio)
        sums["mismatch_kl"] = mismatch.sum()
        sums["sampled_tokens"] = streams.is_sampled.sum()
        sums["max/mismatch_kl"] = mismatch.max() if len(mismatch) else mismatch.sum()
    return loss, sums


def weighted_sum(values: Float[Tensor, " tokens"], weights: Float[Tensor, " tokens"]) -> Float[Tensor, ""]:
    """sum of values * weights; every value must be finite, also where the weight is 0."""
    return (values * weights).sum()
