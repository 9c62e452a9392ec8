"""Advantage estimators: rewards of a group to one advantage per rollout. Pure numpy.

First rewards are shaped (`length_penalty`, `overlong`), then compared (`ADVANTAGE_ESTIMATORS`, by `algo.type`). Last,
if its section says `whiten`, the advantages of the whole batch are whitened.

Advantages are in reward units. A member with is_counted=False (failed, or without a sampled token) is in no baseline
and gets exactly 0. A group is normalised by its counted members. Equal rewards give exactly 0, not the rounding error
of their mean. Advantages per token (discounting, GAE, KL penalty) are in advantages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int

AdvantageEstimator = Callable[..., np.ndarray]
Reduce = Callable[[dict[str, float]], dict[str, float]]

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


def grpo(
    rewards: Float[np.ndarray, " members"],
    is_counted: Bool[np.ndarray, " members"],
    *,
    normalize_std: bool | Literal["unbiased"] = False,
) -> Float[np.ndarray, " members"]:
    """A_i = R_i - mean(R) over the counted members, float64 [members].

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the division as in Dr. GRPO,
    arXiv:2503.20783. Differs: with normalize_std the deviation is the population's, with "unbiased" that of a
    sample (n - 1), and 1e-6 is added to it.
    """
    advantages = np.zeros(len(rewards))
    if has_distinct_rewards(rewards, is_counted):
        counted = rewards[is_counted]
        advantages[is_counted] = counted - counted.mean()
        if normalize_std:
            advantages /= counted.std(ddof=int(normalize_std == "unbiased")) + STD_EPS
    return advantages


def rloo(
    rewards: Float[np.ndarray, " members"], is_counted: Bool[np.ndarray, " members"]
) -> Float[np.ndarray, " members"]:
    """A_i = R_i - the mean of the other counted members, float64 [members].

    Source: RLOO, arXiv:2402.14740, eq. 8. With n counted members it is n / (n - 1) times grpo.
    """
    num_counted = int(is_counted.sum())
    return grpo(rewards, is_counted) * (num_counted / max(num_counted - 1, 1))


def max_rl(
    rewards: Float[np.ndarray, " members"], is_counted: Bool[np.ndarray, " members"]
) -> Float[np.ndarray, " members"]:
    """A_i = (R_i - mean(R)) / mean(R), float64 [members]; all 0 if the mean is not positive.

    For rewards of 0 and 1 the mean is the pass rate.

    Source: maximum likelihood RL, arXiv:2602.02710.
    """
    advantages = grpo(rewards, is_counted)
    mean = rewards[is_counted].mean() if is_counted.any() else 0.0
    return advantages / mean if mean > 0 else np.zeros(len(rewards))


def no_baseline(
    rewards: Float[np.ndarray, " members"], is_counted: Bool[np.ndarray, " members"]
) -> Float[np.ndarray, " members"]:
    """A_i = R_i, float64 [members], for estimators whose baseline is not that of the group.

    ppo: the trainer subtracts its critic's values. reinforce_plus_plus: the baseline is the batch's mean (`whiten`).
    rae: `role_conditioned` subtracts the baseline in the batch.

    Source: REINFORCE++, arXiv:2501.03262, section 3.1. Discount and KL penalty are in advantages.py.
    """
    return np.where(is_counted, rewards, 0.0)


def role_conditioned(
    rewards: Float[np.ndarray, " members"], is_counted: Bool[np.ndarray, " members"], *, baseline: float, decay: float
) -> tuple[Float[np.ndarray, " members"], float]:
    """A_i = R_i - b, float64 [members], and the updated baseline b of one agent.

    b <- decay * b + (1 - decay) * R_i for each counted member in turn. It begins at 0; each agent of each environment
    has a separate b.

    Source: role-conditioned advantage estimation of SPIRAL, arXiv:2506.24119. Differs: all members of a group are
    compared with b as it was before the group; in the paper a reward updates b before it is compared.
    """
    advantages = np.where(is_counted, rewards - baseline, 0.0)
    for reward in rewards[is_counted].tolist():
        baseline = decay * baseline + (1 - decay) * reward
    return advantages, baseline


def hierarchical_grpo(
    rewards: Float[np.ndarray, "members agents"],
    is_counted: Bool[np.ndarray, "members agents"],
    *,
    is_within_episode: bool,
) -> Float[np.ndarray, "members agents"]:
    """A_ij = R_ij - mean, float64 [members, agents], for several agents of one role per episode.

    The mean is over the counted agents of the same episode (row), or of the whole group. An agent without another to
    compare with gets 0.

    Source: the rule of that name in prime-rl 0.8, for one proposer and several solvers.
    """
    if not is_within_episode:
        return grpo(rewards.ravel(), is_counted.ravel()).reshape(rewards.shape)
    return np.stack([grpo(row, counted) for row, counted in zip(rewards, is_counted)])


def among_equals(
    returns: Float[np.ndarray, " turns"],
    keys: Int[np.ndarray, " turns"],
    *,
    normalize_std: bool | Literal["unbiased"] = False,
) -> Float[np.ndarray, " turns"]:
    """A_t = G_t - the mean of G over the turns of the same key, float64 [turns]; 0 for a key below 0, or of one turn.

    With the number of the turn as its key: the return of the n-th turn against those of the other members' n-th
    turns. With the state before the turn: against all turns from an equal state.

    Source: the step-relative advantages of GiGPO, arXiv:2505.10978, over groups of equal anchor states. Differs: the
    deviation is that of `grpo`.
    """
    order = np.argsort(keys, kind="stable")
    advantages = np.zeros(len(returns))
    for places in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if len(places) and keys[places[0]] >= 0:
            is_counted = np.ones(len(places), dtype=bool)
            advantages[places] = grpo(returns[places], is_counted, normalize_std=normalize_std)
    return advantages


def zero(
    rewards: Float[np.ndarray, " members"], is_counted: Bool[np.ndarray, " members"]
) -> Float[np.ndarray, " members"]:
    """All advantages 0: a control run that must not learn."""
    return np.zeros(len(rewards))


def has_distinct_rewards(rewards: Float[np.ndarray, " members"], is_counted: Bool[np.ndarray, " members"]) -> bool:
    """True if the counted members differ in reward."""
    counted = rewards[is_counted]
    return len(counted) > 1 and bool(counted.max() > counted.min())


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "echo": grpo,  # beside a cross-entropy loss
    "grpo": grpo,
    "dr_grpo": grpo,
    "rloo": rloo,
    "max_rl": max_rl,
    "ppo": no_baseline,
    "reinforce_plus_plus": no_baseline,
    "reinforce_plus_plus_baseline": grpo,
    "rae": no_baseline,
    "zero": zero,
}
"""By `algo.type`.

dr_grpo: grpo that is never divided by the standard deviation (Dr. GRPO, arXiv:2503.20783, section 3.1); the other half
of that paper, no division by the reply's length, is reduction = "constant" of the loss. reinforce_plus_plus_baseline:
grpo whose advantages are whitened over the batch (arXiv:2501.03262, section 3.2)."""


CENTERED = frozenset(name for name, estimator in ADVANTAGE_ESTIMATORS.items() if estimator in (grpo, rloo, max_rl))
"""Those whose advantages of a group add up to 0."""


def has_group_signal(
    kind: str,
    rewards: Float[np.ndarray, " members"],
    is_counted: Bool[np.ndarray, " members"],
    advantages: Float[np.ndarray, " members"],
) -> bool:
    """True if a group has signal under the estimator `kind`.

    Estimators with a batch-level baseline: if any rollout is counted. `zero`: if rewards differ, so that it draws the
    same tasks as grpo. Others: if an advantage is not 0.
    """
    if ADVANTAGE_ESTIMATORS.get(kind) is no_baseline:
        return bool(is_counted.any())
    return has_distinct_rewards(rewards, is_counted) if kind == "zero" else bool(advantages.any())


def whiten(
    advantages: Float[np.ndarray, " tokens"], reduce: Reduce = lambda sums: sums
) -> Float64[np.ndarray, " tokens"]:
    """(A - mean) / sqrt(var + 1e-8) over the trained tokens of a batch, float64 [tokens].

    0 if all advantages are equal. The variance is unbiased. reduce adds up the sums of several ranks (`max/` entries
    by maximum).

    Source: REINFORCE++, arXiv:2501.03262, section 3.1, global advantage normalisation.
    """
    values = advantages.astype(np.float64)
    bounds = {"max/high": float(values.max(initial=-np.inf)), "max/low": float(-values.min(initial=np.inf))}
    sums = reduce(bounds | {"total": float(values.sum()), "count": float(len(values))})
    count = sums["count"]
    values = values - sums["total"] / max(count, 1.0)
    squares = reduce({"squares": float(np.square(values).sum())})["squares"]
    if count < 2 or sums["max/high"] == -sums["max/low"]:
        return np.zeros(len(values))
    whitened: np.ndarray = values / np.sqrt(squares / (count - 1) + WHITEN_EPS)
    return whitened


def length_penalty(
    rewards: Float[np.ndarray, " members"],
    is_counted: Bool[np.ndarray, " members"],
    lengths: dict[str, Int[np.ndarray, " members"]],
    weights: dict[str, float],
) -> Float[np.ndarray, " members"]:
    """R_i - mean(R) * sum over kinds of weight * length_i / max length, float64 [members].

    lengths: by kind (output, input, turns), one number per member. Mean and maxima are over counted members only.

    Source: the linear length penalty of prime-rl 0.8.
    """
    if not is_counted.any():
        return rewards.astype(np.float64)
    shares = sum(weights[kind] * n / max(n[is_counted].max(), 1) for kind, n in lengths.items())
    penalised: np.ndarray = rewards - rewards[is_counted].mean() * shares
    return penalised


def overlong(
    rewards: Float[np.ndarray, " members"],
    num_output_tokens: Int[np.ndarray, " members"],
    *,
    max_tokens: int,
    buffer_tokens: int,
    penalty: float,
) -> Float[np.ndarray, " members"]:
    """R_i - penalty * the used share of the buffer, float64 [members].

    Source: soft overlong punishment of DAPO, arXiv:2503.14476, eq. 13. Differs: the penalty has a weight.
    """
    used = (num_output_tokens - (max_tokens - buffer_tokens)) / buffer_tokens
    return rewards - penalty * used.clip(0.0, 1.0)
