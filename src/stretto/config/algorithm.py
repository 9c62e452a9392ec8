"""What is learned from a rollout: the policy loss, `[trainer.loss]`, and how its tokens are added up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.config.section import Section


class LossSection(Section):
    """What all policy losses have."""

    type: str
    reduction: Literal["token", "sample", "constant"] = "token"
    """`token`: the mean over all trained tokens of the batch. `sample`: the mean over samples of each
    sample's mean. `constant`: the sum over a sample's tokens divided by reduction_tokens, averaged over
    samples."""
    reduction_tokens: int | None = Field(None, gt=0)
    """What `constant` divides by, such as the longest reply."""


class DefaultLoss(LossSection):
    """DPPO mask and squared log-ratio KL to the sampling policy."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(0.2, ge=0)
    """Probability drop beyond which a token of negative advantage no longer contributes."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """Probability rise beyond which a token of positive advantage no longer contributes."""
    adv_tau: float = Field(1.0, ge=0)
    """Weight of the policy gradient."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio between trainer and sampler."""


class IpoLoss(LossSection):
    """As the default, but a token whose probability moved either way is dropped, whatever its advantage."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(0.1, ge=0)
    """Change of probability, up or down, beyond which a token no longer contributes."""
    adv_tau: float = Field(1.0, ge=0)
    """Weight of the policy gradient."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio between trainer and sampler."""


class PpoLoss(LossSection):
    """PPO's clipped surrogate on the importance ratio of each token."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, le=1)
    """A ratio below 1 - clip_low no longer pushes a token of negative advantage down."""
    clip_high: float = Field(0.2, ge=0)
    """A ratio above 1 + clip_high no longer pushes a token of positive advantage up; 0.28 is DAPO's
    clip-higher."""
    clip_dual: float | None = Field(None, gt=1)
    """A ratio above it no longer pushes a token of negative advantage; None: no such bound. 3.0 is usual."""


class ReinforceLoss(LossSection):
    """Advantage times log-probability, with no importance ratio: on-policy, or with [trainer.loss.correction]."""

    type: Literal["reinforce"] = "reinforce"


class GspoLoss(LossSection):
    """PPO's clipped surrogate on one ratio a sample, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    reduction: Literal["token", "sample", "constant"] = "sample"
    """As in the other losses; the paper's is `sample`."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """A ratio below 1 - clip_low no longer pushes a sample of negative advantage down."""
    clip_high: float = Field(4e-4, ge=0)
    """A ratio above 1 + clip_high no longer pushes a sample of positive advantage up."""


class CispoLoss(LossSection):
    """Advantage times log-probability, weighted by a clipped ratio that carries no gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, ge=0, le=1)
    """Weights are at least 1 - clip_low; None: no lower bound, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """Weights are at most 1 + clip_high."""


Loss = Annotated[
    DefaultLoss | IpoLoss | PpoLoss | ReinforceLoss | GspoLoss | CispoLoss, Field(discriminator="type")
]
