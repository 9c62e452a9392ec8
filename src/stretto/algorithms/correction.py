"""Off-policy correction: the weight of each token in the rl loss, by how far trainer and sampler are apart.

With r = p / q of a token, p the trained policy and q the sampler, a correction looks at one of

    token      r
    sequence   the product of r over a sample's member tokens
    geometric  their geometric mean

and multiplies the weights of the loss by it, bounded (TIS) or zeroed outside bounds (IcePop, masked IS), or
by 0 or 1 (rejection, veto). Nothing here carries a gradient, and the counts that the loss is divided by stay
those of the uncorrected weights, so that dropping tokens does not push the others harder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from stretto.algorithms.kl import MAX_LOG_RATIO
from stretto.algorithms.segments import Segments
from stretto.config.algorithm import CorrectionSection

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Level = Literal["token", "sequence", "geometric"]


def looks_at_samples(cfg: CorrectionSection) -> bool:
    """Does the correction look at more than one token at a time?"""
    levels = [section.level for section in (cfg.weights, cfg.reject) if section is not None]
    return cfg.veto is not None or any(level != "token" for level in levels)


@torch.no_grad()
def corrected(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    weights: Float[Tensor, " tokens"],
    segments: Segments | None,
    cfg: CorrectionSection,
) -> tuple[Float[Tensor, " tokens"], dict[str, Tensor]]:
    """The weights after correction, and sums over member tokens for metrics (`rl/` names).

    Tokens of weight 0 are no members and count in no ratio.
    """
    log_ratio, is_member = logprobs.detach() - behavior_logprobs, weights != 0
    sums: dict[str, Tensor] = {}
    if cfg.weights is not None:
        ratio = ratios(log_ratio, is_member, segments, cfg.weights.level)
        factor, is_outside = importance_weights(
            ratio, mode=cfg.weights.mode, low=cfg.weights.low, high=cfg.weights.high
        )
        weights = weights * factor
        sums["rl/correction/weight"] = factor[is_member].sum()
        sums["rl/correction/is_outside"] = (is_outside & is_member).sum()
    if cfg.reject is not None:
        ratio = ratios(log_ratio, is_member, segments, cfg.reject.level)
        is_rejected = (ratio < cfg.reject.low) | (ratio > cfg.reject.high)
        weights = weights.masked_fill(is_rejected, 0.0)
        sums["rl/correction/is_rejected"] = (is_rejected & is_member).sum()
    if cfg.veto is not None:
        assert segments is not None
        is_vetoed = vetoed(log_ratio, is_member, segments, threshold=cfg.veto)
        weights = weights.masked_fill(is_vetoed, 0.0)
        sums["rl/correction/is_vetoed"] = (is_vetoed & is_member).sum()
    return weights, sums


def ratios(
    log_ratio: Float[Tensor, " tokens"],
    is_member: Bool[Tensor, " tokens"],
    segments: Segments | None,
    level: Level,
) -> Float[Tensor, " tokens"]:
    """Every token's ratio at a level; a sample's is the same for all its tokens.

    Log ratios (and their sum) are cut at 20 either way, far beyond every sensible bound, to stay finite.

    Source: levels of "When Speed Kills Stability", J. Liu et al., 2025; geometric as in GSPO,
    arXiv:2507.18071.
    """
    if level != "token":
        assert segments is not None
        if level == "geometric":
            of_sample = segments.mean(log_ratio, is_member)
        else:
            of_sample = segments.sum(log_ratio.masked_fill(~is_member, 0.0))
        log_ratio = segments.spread(of_sample)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_weights(
    ratio: Float[Tensor, " tokens"], *, mode: Literal["truncate", "mask"], low: float, high: float
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """The ratio as a weight, and which ratios lie outside [low, high].

    Outside, truncate gives the bound and mask gives 0. Weights inside are not rescaled to make up for it.

    Source: truncate, TIS, F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025; mask, IcePop, arXiv:2510.18855.
    """
    is_outside = (ratio < low) | (ratio > high)
    return ratio.clamp(low, high) if mode == "truncate" else ratio.masked_fill(is_outside, 0.0), is_outside


def vetoed(
    log_ratio: Float[Tensor, " tokens"],
    is_member: Bool[Tensor, " tokens"],
    segments: Segments,
    *,
    threshold: float,
) -> Bool[Tensor, " tokens"]:
    """All tokens of a sample of which any member token has a ratio below the threshold.

    Source: the veto of masked importance sampling in slime's train-infer mismatch helper.
    """
    is_catastrophic = is_member & (log_ratio.exp() < threshold)
    return segments.spread(segments.count(is_catastrophic) > 0)
