"""Per-token estimators of KL divergence from tokens that were sampled.

k1, k2, k3 estimate KL(q || p) from tokens of q, as functions of log r with r = p(token) / q(token). The reported
mismatch compares sampler and trainer; the reference loss compares trainer and reference.
Source: J. Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

LOW_VAR_MAX = 10.0
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before they are exponentiated, so that ratios stay finite."""


def k1(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-log r: unbiased, high variance, can be negative."""
    return -log_ratio


def k2(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """(log r)^2 / 2: biased, low variance, never negative."""
    return log_ratio.square() * 0.5


def k3(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """r - 1 - log r: unbiased, low variance, never negative; what `mismatch_kl` reports.

    Differs: r - 1 is expm1(log r), so that a mismatch of 1e-6 is not lost to rounding; in it log r is clamped at 20.
    """
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio


def low_var(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """k3 clamped at 10, so that one token cannot dominate the mean."""
    return k3(log_ratio).clamp(max=LOW_VAR_MAX)


def reference_kl(
    logprobs: Float[Tensor, " tokens"],
    behavior_logprobs: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"],
    *,
    estimator: str,
    is_unbiased: bool,
) -> Float[Tensor, " tokens"]:
    """Estimates of KL(trainer || reference), with gradient.

    On on-policy tokens the mean gradient of k2 is that of the divergence; that of k3 is only near the reference, and
    that of k1 is zero. is_unbiased multiplies by trainer / sampler, with its gradient: then the mean value and
    gradient of k1 and k3 are those of the divergence, whichever policy sampled.

    Source: GRPO, arXiv:2402.03300, eq. 4 (k3); unbiased estimate of DeepSeek-V3.2, arXiv:2512.02556.
    Differs: log ratios are clamped at 20 before they are exponentiated.
    """
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = ESTIMATORS[estimator](log_ratio)
    if is_unbiased:
        values = values * (logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return values


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "low_var": low_var}
