"""Rewards of a group become advantages: one number per rollout, in reward units. Pure numpy.

A member with is_counted=False (failed, or without a sampled token) belongs to no baseline and gets exactly
0. Rewards that are all equal give exactly 0, never the rounding error of their mean. `CREDIT` names the
functions by `algo.type`; token-level advantages (discounting, GAE, KL shaping) are not here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Credit = Callable[..., np.ndarray]

STD_EPS = 1e-6


def grpo(rewards: np.ndarray, is_counted: np.ndarray, *, normalize_std: bool = False) -> np.ndarray:
    """A_i = R_i - mean(R) over the counted members, float64 [members].

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the division as in Dr. GRPO,
    arXiv:2503.20783. Differs: with normalize_std the deviation is the population's and 1e-6 is added to it.
    """
    advantages = np.zeros(len(rewards))
    if has_signal(rewards, is_counted):
        counted = rewards[is_counted]
        advantages[is_counted] = counted - counted.mean()
        if normalize_std:
            advantages /= counted.std() + STD_EPS
    return advantages


def zero(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """All advantages 0: the control that must not learn."""
    return np.zeros(len(rewards))


def has_signal(rewards: np.ndarray, is_counted: np.ndarray) -> bool:
    """Do the counted members differ in reward? If not, no baseline among them can tell one from another."""
    counted = rewards[is_counted]
    return len(counted) > 1 and bool(counted.max() > counted.min())


CREDIT: dict[str, Credit] = {"grpo": grpo, "zero": zero}
