"""Losses of a training API: sums over tokens, nothing divided.

Source: the documentation and the types of the `tinker` client, 0.38 (losses cross_entropy, importance_sampling, ppo,
cispo, dro, gspo). Differs: log ratios are clamped as in algorithms/policy_loss.py, so that a far outlier is finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.algorithms.kl import MAX_LOG_RATIO
from stretto.algorithms.losses import TokenStreams, weighted_sum
from stretto_service.wires.operations import SumLoss

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def sum_loss(
    logprobs: Float[Tensor, " tokens"], streams: TokenStreams, spec: SumLoss
) -> tuple[Float[Tensor, ""], dict[str, Shaped[Tensor, ""]]]:
    """A micro batch's share of the loss, and detached sums for metrics.

    gspo needs streams with a sample_index. A component without any weight is 0.
    """
    if spec.type == "cross_entropy":
        weights = streams.ce_weights
        losses = -logprobs
    else:
        weights = streams.rl_weights
        losses = _policy_losses(logprobs, streams, spec)
    if weights is None:
        return logprobs.sum() * 0.0, {}
    is_member = weights != 0
    name = "ce_tokens" if spec.type == "cross_entropy" else "rl_tokens"
    # A factor of 0 does not hide a value that is not finite, and tokens outside may have no advantage or sampler.
    return weighted_sum(losses.masked_fill(~is_member, 0.0), weights), {name: is_member.sum()}


def _policy_losses(logprobs: Tensor, streams: TokenStreams, spec: SumLoss) -> Tensor:
    advantages = streams.advantages
    log_ratio = logprobs - streams.behavior_logprobs
    if spec.type == "dro":
        return spec.beta / 2 * log_ratio.square() - advantages * logprobs
    if spec.type == "gspo":
        assert streams.rl_weights is not None
        mean = streams.samples.mean(log_ratio.detach(), streams.rl_weights != 0)
        # The value of the document's ratio, with the gradient of the token's own log-probability.
        log_ratio = streams.samples.spread(mean) + logprobs - logprobs.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(spec.clip_low_threshold, spec.clip_high_threshold)
    match spec.type:
        case "importance_sampling":
            return -ratio * advantages
        case "cispo":
            return -clipped.detach() * advantages * logprobs
        case _:
            return -torch.minimum(ratio * advantages, clipped * advantages)


def needs_sample_index(spec: SumLoss) -> bool:
    """Does the loss use whole documents?"""
    return spec.type == "gspo"
