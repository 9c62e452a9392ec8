"""Rewards of a group become advantages: one number per rollout, in reward units. Pure numpy.

First rewards are shaped (`length_penalty`, `overlong`), then compared (`CREDIT`, by `algo.type`), and where
the rule is in `WHITENED` the advantages of a whole batch are whitened at last. A member with
is_counted=False (failed, or without a sampled token) belongs to no baseline and gets exactly 0; a group is
normalised by its own counted members, however many they are. Rewards that are all equal give exactly 0,
never the rounding error of their mean. Advantages of tokens (discounting, GAE, KL shaping) are advantages.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Credit = Callable[..., np.ndarray]

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


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


def dr_grpo(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean(R), float64 [members]: grpo that no setting can divide by a deviation.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.1. Its other half, no division by a reply's length, is the
    loss's reduction = "constant".
    """
    return grpo(rewards, is_counted)


def rloo(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = R_i - the mean of the other counted members, float64 [members].

    Source: RLOO, arXiv:2402.14740, eq. 8. With n counted members it is n / (n - 1) times grpo.
    """
    num_counted = int(is_counted.sum())
    return grpo(rewards, is_counted) * (num_counted / max(num_counted - 1, 1))


def max_rl(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = (R_i - mean(R)) / mean(R), float64 [members]; 0 for all where the mean is not positive.

    For rewards of 0 and 1 the mean is the pass rate.

    Source: maximum likelihood RL, arXiv:2602.02710.
    """
    advantages = grpo(rewards, is_counted)
    mean = rewards[is_counted].mean() if is_counted.any() else 0.0
    return advantages / mean if mean > 0 else np.zeros(len(rewards))


def ppo(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = R_i, float64 [members]: a score that the trainer turns into advantages with its critic's values."""
    return np.where(is_counted, rewards, 0.0)


def reinforce_plus_plus(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = R_i, float64 [members]; the batch's mean is its baseline (`whiten`).

    Source: REINFORCE++, arXiv:2501.03262, section 3.1. Discount and KL in the reward are advantages.py's.
    """
    return np.where(is_counted, rewards, 0.0)


def reinforce_plus_plus_baseline(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean(R), float64 [members], to be whitened over the batch.

    Source: REINFORCE++-baseline, arXiv:2501.03262, section 3.2. KL in the reward is advantages.py's.
    """
    return grpo(rewards, is_counted)


def rae(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """A_i = R_i, float64 [members], until the batch is made: then `role_conditioned` takes off the baseline."""
    return np.where(is_counted, rewards, 0.0)


def role_conditioned(
    rewards: np.ndarray, is_counted: np.ndarray, *, baseline: float, decay: float
) -> tuple[np.ndarray, float]:
    """A_i = R_i - b, float64 [members], and b after b <- decay * b + (1 - decay) * R_i over the counted members.

    b belongs to one agent of one environment and begins at 0.

    Source: role-conditioned advantage estimation of SPIRAL, arXiv:2506.24119. Differs: all members of a group are
    compared with b as it was before the group; in the paper a reward moves b before it is compared.
    """
    advantages = np.where(is_counted, rewards - baseline, 0.0)
    for reward in rewards[is_counted].tolist():
        baseline = decay * baseline + (1 - decay) * reward
    return advantages, baseline


def hierarchical_grpo(rewards: np.ndarray, is_counted: np.ndarray, *, is_within_episode: bool) -> np.ndarray:
    """A_ij = R_ij - mean, float64 [members, players]: of players of one role, of whom an episode has several.

    The mean is over the counted players of the same episode (row), or over those of the whole group. Alone in
    what it is compared with, a player gets 0.

    Source: the rule of that name in prime-rl 0.8, for one proposer and several solvers.
    """
    if not is_within_episode:
        return grpo(rewards.ravel(), is_counted.ravel()).reshape(rewards.shape)
    return np.stack([grpo(row, counted) for row, counted in zip(rewards, is_counted)])


def zero(rewards: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """All advantages 0: the control that must not learn."""
    return np.zeros(len(rewards))


def has_signal(rewards: np.ndarray, is_counted: np.ndarray) -> bool:
    """Do the counted members differ in reward? If not, no baseline among them can tell one from another."""
    counted = rewards[is_counted]
    return len(counted) > 1 and bool(counted.max() > counted.min())


CREDIT: dict[str, Credit] = {
    "echo": grpo,  # and a cross-entropy, which is no matter of credit
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "max_rl": max_rl,
    "ppo": ppo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rae": rae,
    "zero": zero,
}

WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Rules whose advantages are whitened over the batch, here or in the trainer."""
NOT_COMPARED = frozenset({"ppo", "reinforce_plus_plus", "rae"})
"""Rules that do not compare a group with itself; the baseline comes with the batch."""


def can_teach(kind: str, rewards: np.ndarray, is_counted: np.ndarray, advantages: np.ndarray) -> bool:
    """Has this group a signal under the rule `kind`?

    Groups compared with more than themselves always have; the control is told by rewards, so that it
    draws what grpo would; all others are told by their advantages.
    """
    if kind in NOT_COMPARED:
        return bool(is_counted.any())
    return has_signal(rewards, is_counted) if kind == "zero" else bool(advantages.any())


def whiten(advantages: np.ndarray) -> np.ndarray:
    """(A - mean) / sqrt(var + 1e-8) of the trained tokens of a batch; 0 where all are equal.

    The variance is unbiased.

    Source: REINFORCE++, arXiv:2501.03262, section 3.1, global advantage normalisation.
    """
    if len(advantages) < 2 or advantages.max() == advantages.min():
        return np.zeros(len(advantages))
    values = advantages.astype(np.float64)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + WHITEN_EPS)


def length_penalty(
    rewards: np.ndarray, is_counted: np.ndarray, lengths: dict[str, np.ndarray], weights: dict[str, float]
) -> np.ndarray:
    """R_i - mean(R) * sum over kinds of weight * length_i / max length, float64 [members].

    lengths: by kind (output, input, turns) one number a member. Only counted members make mean and maxima.

    Source: the linear length penalty of prime-rl 0.8.
    """
    if not is_counted.any():
        return rewards.astype(np.float64)
    shares = sum(weights[kind] * n / max(n[is_counted].max(), 1) for kind, n in lengths.items())
    return rewards - rewards[is_counted].mean() * shares


def overlong(
    rewards: np.ndarray, num_output_tokens: np.ndarray, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> np.ndarray:
    """R_i - penalty * the share of the buffer that the output has used up, float64 [members].

    Source: soft overlong punishment of DAPO, arXiv:2503.14476, eq. 13. Differs: the penalty has a weight.
    """
    used = (num_output_tokens - (max_tokens - buffer_tokens)) / buffer_tokens
    return rewards - penalty * used.clip(0.0, 1.0)
