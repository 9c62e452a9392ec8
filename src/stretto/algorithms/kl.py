"""Per-token estimators of KL(sampler || trainer) from tokens the sampler drew.

With r = p(token) / q(token), q the distribution that sampled. All are functions of log r.
Source: J. Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def k1(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-log r: unbiased, high variance, can be negative."""
    return -log_ratio


def k2(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """(log r)^2 / 2: biased, low variance, never negative."""
    return log_ratio.square() * 0.5


def k3(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """r - 1 - log r: unbiased, low variance, never negative; what `mismatch_kl` reports.

    Differs: r - 1 is expm1(log r), so that a mismatch of 1e-6 is not rounded away.
    """
    return torch.expm1(log_ratio) - log_ratio
