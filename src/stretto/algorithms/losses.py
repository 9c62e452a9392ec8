"""The loss of a step: a sum of components, each divided by its own global token count.

    L = sum_rl l*w / N_rl  +  sum_ce l*w / N_ce  +  sum_ref_kl l*w / N_ref_kl

N is the number of tokens of non-zero weight over all ranks and micro batches (at least 1). So a step does not depend
on how the batch was split, and weights scale the numerator only. A token may be in several components. The rl
component can also be reduced per sample or by a constant (`reduce_rl`). This module has component masks, counts, and
the sum over one micro batch; per-token losses are in policy_loss.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.algorithms import kl
from stretto.algorithms.correction import correct_weights, needs_sample_index
from stretto.algorithms.custom import LossInputs, custom_loss
from stretto.algorithms.policy_loss import (
    AlternativeTokens,
    PolicyLoss,
    alternatives_kl,
    cispo,
    dppo_kl,
    gspo,
    ipo,
    ppo,
    ref_kl,
    reinforce,
)
from stretto.algorithms.sample_index import SampleIndex
from stretto.config.sections.algorithm import CustomLoss, LossSection
from stretto.records.token_counts import TokenCounts

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped


@dataclass(frozen=True)
class TokenStreams:
    """Data of each trained token, one value per token; None if no token has that component.

    A component's weight is 0 on tokens outside it. `is_sampled` marks the tokens with valid behavior_logprobs.
    """

    is_sampled: Bool[Tensor, " tokens"]
    behavior_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    rl_weights: Float[Tensor, " tokens"] | None = None
    ce_weights: Float[Tensor, " tokens"] | None = None
    ref_kl_weights: Float[Tensor, " tokens"] | None = None
    ref_logprobs: Float[Tensor, " tokens"] | None = None
    alternatives: AlternativeTokens | None = None
    """What teachers hold for likeliest, at some of the tokens with ref_kl_weights."""
    old_logprobs: Float[Tensor, " tokens"] | None = None
    """Those of the policy before the step; None if that is the policy of this pass."""
    sample_index: SampleIndex | None = None
    """The sample of each token; required if `needs_samples`."""

    def filled_in(self, logprobs: Float[Tensor, " tokens"]) -> TokenStreams:
        """The streams with the trainer's log-probabilities where the sampler's are unknown (nan).

        logprobs: those of this pass, used if the policy before the step is that of this pass.
        """
        is_unknown = self.behavior_logprobs.isnan()
        if not is_unknown.any():
            return self
        filler = logprobs.detach() if self.old_logprobs is None else self.old_logprobs
        return replace(self, behavior_logprobs=torch.where(is_unknown, filler, self.behavior_logprobs))

    @property
    def samples(self) -> SampleIndex:
        assert self.sample_index is not None, "this loss uses whole samples; build rows with a sample_index"
        return self.sample_index


UserCorrection = Callable[[Tensor, Tensor, TokenStreams], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(losses per token, log-probabilities of the policy before the step, streams) -> losses, weights, sums for metrics."""
UserReducer = Callable[[Tensor, Tensor, TokenStreams, bool], Tensor]
"""(losses and weights per token, streams, True if all tokens count alike) -> their sum over samples or tokens."""
UserLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(function that sums values per token by the config's reduction) -> loss and metrics, each a sum of that function."""


@dataclass(frozen=True)
class UserFunctions:
    """A user's functions in the rl component, if there are any."""

    correct: UserCorrection | None = None
    """Corrects losses and weights, after the correction of the config."""
    reduce: UserReducer | None = None
    """Sums the policy's losses per token, instead of `reduce_rl`."""
    loss: UserLoss | None = None
    """Replaces the whole component: policy loss, entropy bonus and reference KL of the config are not computed."""


TokenLoss = Callable[[Tensor, TokenStreams, Any], PolicyLoss]
"""(logprobs, streams with rl weights, section of its type) -> losses per token."""


def _per_token(loss: Callable[..., PolicyLoss], **options: str) -> TokenLoss:
    """A loss of policy_loss.py whose `options` are these fields of its section."""

    def compute(logprobs: Tensor, s: TokenStreams, cfg: Any) -> PolicyLoss:
        values = {name: getattr(cfg, field) for name, field in options.items()}
        return loss(logprobs, s.behavior_logprobs, s.advantages, **values)

    return compute


def _gspo(logprobs: Tensor, s: TokenStreams, cfg: Any) -> PolicyLoss:
    assert s.rl_weights is not None
    options = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    return gspo(logprobs, s.behavior_logprobs, s.advantages, s.samples, s.rl_weights != 0, **options)


_CLIP = {"clip_low": "clip_low", "clip_high": "clip_high"}
_TAUS = {"adv_tau": "adv_tau", "kl_tau": "kl_tau"}
POLICY_LOSSES: dict[str, TokenLoss] = {
    "default": _per_token(dppo_kl, mask_low="dppo_mask_low", mask_high="dppo_mask_high", **_TAUS),
    "ipo": _per_token(ipo, threshold="ipo_threshold", **_TAUS),
    "ppo": _per_token(ppo, clip_dual="clip_dual", **_CLIP),
    "reinforce": lambda logprobs, s, cfg: reinforce(logprobs, s.advantages),
    "gspo": _gspo,
    "cispo": _per_token(cispo, **_CLIP),
}  # fmt: skip


def needs_samples(cfg: LossSection) -> bool:
    """True if the loss uses more than one token at a time."""
    is_corrected = cfg.correction is not None and needs_sample_index(cfg.correction)
    return cfg.type in ("gspo", "custom") or cfg.reduction == "sample" or is_corrected


def total_loss(
    logprobs: Float[Tensor, " tokens"],
    streams: TokenStreams,
    counts: TokenCounts,
    cfg: LossSection,
    *,
    entropy: Float[Tensor, " tokens"] | None = None,
    reference_logprobs: Float[Tensor, " tokens"] | None = None,
    alternative_logprobs: Float[Tensor, "tokens alternatives"] | None = None,
    user: UserFunctions = UserFunctions(),
) -> tuple[Float[Tensor, ""], dict[str, Shaped[Tensor, ""]]]:
    """This micro batch's share of the step's loss, and detached sums for metrics.

    The shares of all micro batches and ranks add up to L. The sums are unweighted counts or totals over tokens;
    `max/` entries are maxima, `rl/` entries are over the tokens of the rl component. entropy (with gradient) and
    reference_logprobs are required if cfg has a coefficient for them, alternative_logprobs (of their ids, teacher by
    teacher) if there are alternatives.
    """
    loss = logprobs.new_zeros(())
    sums: dict[str, Tensor] = {}
    if streams.rl_weights is not None and user.loss is not None:
        loss, sums = _users_loss(user.loss, streams, counts, cfg)
    elif streams.rl_weights is not None:
        loss, sums = _rl_component(logprobs, streams, counts, cfg, entropy, reference_logprobs, user)
    if streams.ce_weights is not None:
        loss = loss - weighted_sum(logprobs, streams.ce_weights) / max(counts.ce, 1)
        is_member = streams.ce_weights != 0
        sums["nll"] = -weighted_sum(logprobs.detach(), is_member.float())
        sums["ce_tokens"] = is_member.sum()
    if streams.ref_kl_weights is not None:
        assert streams.ref_logprobs is not None, "ref_kl weights without ref_logprobs"
        distilled = ref_kl(logprobs, streams.behavior_logprobs, streams.ref_logprobs)
        token_losses, alternatives = distilled.loss, streams.alternatives
        if alternatives is not None:
            assert alternative_logprobs is not None, "alternatives without the policy's log-probabilities"
            has_any = alternatives.weights.sum(-1) > 0
            token_losses = torch.where(has_any, alternatives_kl(alternative_logprobs, alternatives), token_losses)
        loss = loss + weighted_sum(token_losses, streams.ref_kl_weights) / max(counts.ref_kl, 1)
        is_member = streams.ref_kl_weights != 0
        sums["teacher_kl"] = weighted_sum(logprobs.detach() - streams.ref_logprobs, is_member.float())
        sums["ref_kl_tokens"] = is_member.sum()
    with torch.no_grad():
        log_ratio = (logprobs - streams.behavior_logprobs).masked_fill(~streams.is_sampled, 0.0)
        mismatch = kl.k3(log_ratio)
        sums["mismatch_kl"] = mismatch.sum()
        sums["sampled_tokens"] = streams.is_sampled.sum()
        sums["max/mismatch_kl"] = mismatch.max() if len(mismatch) else mismatch.sum()
    return loss, sums


def _rl_component(
    logprobs: Tensor,
    streams: TokenStreams,
    counts: TokenCounts,
    cfg: LossSection,
    entropy: Tensor | None,
    reference_logprobs: Tensor | None,
    user: UserFunctions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss with correction, entropy bonus and reference KL, and sums for metrics."""
    assert streams.rl_weights is not None
    sums: dict[str, Tensor] = {}
    # Without use_rollout_logprobs the loss compares with the policy before the step, not with the sampler,
    # and the correction compares that policy with the sampler.
    loss_streams, numerator = streams, logprobs
    if not cfg.use_rollout_logprobs:
        numerator = logprobs.detach() if streams.old_logprobs is None else streams.old_logprobs
        loss_streams = replace(streams, behavior_logprobs=numerator)
    if isinstance(cfg, CustomLoss):
        policy = _custom_policy_loss(logprobs, loss_streams, cfg, sums)
    else:
        policy = POLICY_LOSSES[cfg.type](logprobs, loss_streams, cfg)
    weights = streams.rl_weights
    if cfg.correction is not None:
        weights, extra = correct_weights(
            numerator, streams.behavior_logprobs, weights, streams.sample_index, cfg.correction
        )
        sums |= extra
    token_losses = policy.loss
    if user.correct is not None:
        token_losses, factor, extra = user.correct(token_losses, numerator.detach(), streams)
        weights = weights * factor
        sums |= {f"rl/{name}": value for name, value in extra.items()}
    is_member = streams.rl_weights != 0
    if user.reduce is None:
        loss = reduce_rl(token_losses, weights, streams, counts, cfg)
    else:
        corrected = torch.where(is_member, weights / streams.rl_weights, 0.0)
        summed = user.reduce(token_losses, corrected, streams, cfg.reduction == "token")
        loss = summed / rl_denominator(counts, cfg)
    if cfg.entropy_coef is not None:
        assert entropy is not None, "an entropy bonus needs the entropy"
        loss = loss - cfg.entropy_coef * reduce_rl(entropy, streams.rl_weights, streams, counts, cfg)
    if cfg.reference_kl is not None:
        assert reference_logprobs is not None, "a reference KL needs the reference's log-probabilities"
        distance = kl.reference_kl(
            logprobs,
            streams.behavior_logprobs,
            reference_logprobs,
            estimator=cfg.reference_kl.estimator,
            is_unbiased=cfg.reference_kl.is_unbiased,
        )
        loss = loss + cfg.reference_kl.coef * reduce_rl(distance, streams.rl_weights, streams, counts, cfg)
        sums["rl/reference_kl"] = kl.k3((reference_logprobs - logprobs).detach())[is_member].sum()
    sums["is_masked_low"] = (policy.is_dropped_low & is_member).sum()
    sums["is_masked_high"] = (policy.is_dropped_high & is_member).sum()
    sums["rl_tokens"] = is_member.sum()
    return loss, sums


def _users_loss(
    user_loss: UserLoss, streams: TokenStreams, counts: TokenCounts, cfg: LossSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """The rl component as a user's function computes it, and sums for metrics."""
    weights, denominator = streams.rl_weights, rl_denominator(counts, cfg)
    assert weights is not None
    value, metrics = user_loss(lambda values: reduce_rl(values, weights, streams, counts, cfg) * denominator)
    num_members = (weights != 0).sum()
    sums = {"rl_tokens": num_members, "is_masked_low": 0 * num_members, "is_masked_high": 0 * num_members}
    # The caller divides metrics by the step's tokens; they were summed over counts of `denominator` instead.
    sums |= {f"rl/{name}": each * (counts.rl / denominator) for name, each in metrics.items()}
    return value / denominator, sums


def _custom_policy_loss(
    logprobs: Tensor, streams: TokenStreams, cfg: CustomLoss, sums: dict[str, Tensor]
) -> PolicyLoss:
    assert streams.rl_weights is not None
    is_member = streams.rl_weights != 0
    inputs = LossInputs(logprobs, streams.behavior_logprobs, streams.advantages, is_member, streams.samples)
    outputs = custom_loss(cfg, inputs)
    for name, values in outputs.metrics.items():
        sums[f"rl/{name}"] = values.detach()[is_member].sum()
    nothing = torch.zeros_like(is_member)
    return PolicyLoss(outputs.loss, nothing, nothing)


def reduce_rl(
    values: Float[Tensor, " tokens"],
    weights: Float[Tensor, " tokens"],
    streams: TokenStreams,
    counts: TokenCounts,
    cfg: LossSection,
) -> Float[Tensor, ""]:
    """Reduce one value per token to this micro batch's share of the rl component.

    token: sum / N_rl. sample: sum over samples of (sum / the sample's members) / samples. rollout: sum / rollouts,
    for the caller has divided the weights by the rollouts' members. constant: sum / (samples * reduction_tokens). A
    sample's members are its tokens of non-zero rl weight in `streams`, even if `weights` is 0.

    Source: token, DAPO, arXiv:2503.14476, eq. 8; sample, GRPO, arXiv:2402.03300, eq. 3; constant, Dr. GRPO,
    arXiv:2503.20783, section 3.1.
    """
    if cfg.reduction == "sample":
        assert streams.rl_weights is not None
        lengths = streams.samples.count(streams.rl_weights != 0).clamp(min=1)
        weights = weights / streams.samples.spread(lengths)
    return weighted_sum(values, weights) / rl_denominator(counts, cfg)


def rl_denominator(counts: TokenCounts, cfg: LossSection) -> float:
    """The divisor of the rl component's sum over all micro batches and ranks."""
    if cfg.reduction == "token":
        return max(counts.rl, 1)
    if cfg.reduction == "rollout":
        return counts.rl_samples or 1.0
    if cfg.reduction == "constant":
        assert cfg.reduction_tokens is not None, "checked with the config"
        return max(counts.rl_samples, 1) * cfg.reduction_tokens
    return max(counts.rl_samples, 1)


def weighted_sum(values: Float[Tensor, " tokens"], weights: Float[Tensor, " tokens"]) -> Float[Tensor, ""]:
    """Sum of values * weights; every value must be finite, even if its weight is 0."""
    return (values * weights).sum()
