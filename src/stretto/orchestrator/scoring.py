"""A finished group gets its advantages. Rewards were given by the environment; credit compares them."""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.algorithms.credit import CREDIT, has_signal
from stretto.config.orchestrator import Algo
from stretto.records.rollout import Group, Rollout, RolloutStatus

COUNTED = (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED)


def is_counted(rollout: Rollout) -> bool:
    """Does this rollout belong to its group's baseline and to the batch?"""
    return rollout.status in COUNTED


def score(group: Group, algo: Algo) -> tuple[Group, bool]:
    """The group with one advantage a rollout (0 for failed ones), and whether its rewards differ at all."""
    rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    counted = np.array([is_counted(rollout) for rollout in group.rollouts], dtype=bool)
    options = algo.model_dump(exclude={"type"})
    advantages = CREDIT[algo.type](rewards, counted, **options)
    return msgspec.structs.replace(group, advantages=tuple(advantages.tolist())), has_signal(rewards, counted)
