"""Off-policy correction: weights rl tokens by how far trainer and sampler differ.

With r = p / q of a token, p the trained policy and q the sampler, a correction uses one of

    token      r
    sequence   the product of r over a sample's tokens in the rl component
    geometric  their geometric mean

and multiplies the loss weights by it, clamped (TIS) or zeroed outside its bounds (IcePop, masked IS), or by 0 or 1
(rejection, veto). Corrections have no gradient. The loss is divided by the counts of the uncorrected weights, so that
dropping tokens does not increase the weight of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from stretto.algorithms.kl import MAX_LOG_RATIO
from stretto.algorithms.sample_index import SampleIndex
from stretto.config.sections.algorithm import CorrectionSection, Level

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped


def needs_sample_index(cfg: CorrectionSection) -> bool:
    """True if the correction uses more than one token at a time."""
    levels = [section.level for section in (cfg.weights, cfg.reject) if section is not None]
    return cfg.veto is not None or any(level != "token" for level in levels)


@torch.no_grad()
def correct_weights(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    weights: Float[Tensor, " tokens"],
    sample_index: SampleIndex | None,
    cfg: CorrectionSection,
) -> tuple[Float[Tensor, " tokens"], dict[str, Shaped[Tensor, ""]]]:
    """The weights after correction, and sums over tokens for metrics (`rl/` names).

    Tokens of weight 0 are not in the component and count in no ratio.
    """
    log_ratio, is_member = logprobs.detach() - behavior_logprobs, weights != 0
    sums: dict[str, Tensor] = {}
    if cfg.weights is not None:
        ratio = ratios(log_ratio, is_member, sample_index, cfg.weights.level)
        factor, is_outside = importance_weights(
            ratio, mode=cfg.weights.mode, low=cfg.weights.low, high=cfg.weights.high
        )
        weights = weights * factor
        sums["rl/correction/weight"] = factor[is_member].sum()
        sums["rl/correction/is_outside"] = (is_outside & is_member).sum()
    if cfg.reject is not None:
        ratio = ratios(log_ratio, is_member, sample_index, cfg.reject.level)
        is_rejected = (ratio < cfg.reject.low) | (ratio > cfg.reject.high)
        weights = weights.masked_fill(is_rejected, 0.0)
        sums["rl/correction/is_rejected"] = (is_rejected & is_member).sum()
    if cfg.veto is not None:
        assert sample_index is not None
        is_vetoed = veto_mask(log_ratio, is_member, sample_index, threshold=cfg.veto)
        weights = weights.masked_fill(is_vetoed, 0.0)
        sums["rl/correction/is_vetoed"] = (is_vetoed & is_member).sum()
    return weights, sums


def ratios(
    log_ratio: Float[Tensor, " tokens"],
    is_member: Bool[Tensor, " tokens"],
    sample_index: SampleIndex | None,
    level: Level,
) -> Float[Tensor, " tokens"]:
    """The ratio of each token at a level; at a sample level it is the same for all its tokens.

    Log ratios (and their sum) are clamped to [-20, 20], far beyond any sensible bound, to stay finite.

    Source: levels of "When Speed Kills Stability", J. Liu et al., 2025; geometric as in GSPO,
    arXiv:2507.18071.
    """
    if level != "token":
        assert sample_index is not None
        if level == "geometric":
            of_sample = sample_index.mean(log_ratio, is_member)
        else:
            of_sample = sample_index.sum(log_ratio.masked_fill(~is_member, 0.0))
        log_ratio = sample_index.spread(of_sample)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_weights(
    ratio: Float[Tensor, " tokens"], *, mode: Literal["truncate", "mask"], low: float, high: float
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Ratios as weights, and which ratios are outside [low, high].

    Outside, `truncate` gives the bound and `mask` gives 0. Weights inside are not rescaled.

    Source: truncate, TIS, F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025; mask, IcePop, arXiv:2510.18855.
    """
    is_outside = (ratio < low) | (ratio > high)
    return ratio.clamp(low, high) if mode == "truncate" else ratio.masked_fill(is_outside, 0.0), is_outside


def veto_mask(
    log_ratio: Float[Tensor, " tokens"],
    is_member: Bool[Tensor, " tokens"],
    sample_index: SampleIndex,
    *,
    threshold: float,
) -> Bool[Tensor, " tokens"]:
    """Mask of all tokens of those samples that have a ratio below the threshold at any member.

    Source: the veto of masked importance sampling in slime's train-infer mismatch helper.
    """
    is_catastrophic = is_member & (log_ratio.exp() < threshold)
    return sample_index.spread(sample_index.count(is_catastrophic) > 0)
