"""A finished group gets its advantages.

Rewards were given by the environment; they are shaped by length where [algo] says so, and compared.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.algorithms.credit import CREDIT, can_teach, length_penalty, overlong
from stretto.algorithms.custom import CreditInputs, custom_credit
from stretto.config.algorithm import Algo, CreditSection, CustomAlgo
from stretto.config.distill import OpdAlgo
from stretto.records.rollout import Group, Rollout, RolloutStatus

COUNTED = (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED)
SHAPING = {"type", "length_penalty", "overlong"}
"""Keys of an algo that are not options of its rule."""


def is_counted(rollout: Rollout) -> bool:
    """Does this rollout belong to its group's baseline and to the batch?"""
    return rollout.status in COUNTED


def is_distilled(rollout: Rollout) -> bool:
    """Did a teacher score this rollout? It is then trained on that, and not on its reward."""
    return any(branch.ref_logprobs is not None for branch in rollout.branches)


def score(group: Group, algo: Algo) -> tuple[Group, bool]:
    """The group with one advantage a rollout (0 for failed ones), and whether it has a signal."""
    rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    counted = np.array([is_counted(rollout) for rollout in group.rollouts], dtype=bool)
    if isinstance(algo, OpdAlgo):
        has_signal = any(is_counted(rollout) and is_distilled(rollout) for rollout in group.rollouts)
        return msgspec.structs.replace(group, advantages=(0.0,) * len(group.rollouts)), has_signal
    if isinstance(algo, CreditSection):
        rewards = shape(rewards, counted, group, algo)
    if isinstance(algo, CustomAlgo):
        advantages = custom_credit(algo, CreditInputs(rewards, counted, group))
    else:
        options = algo.model_dump(exclude=SHAPING)
        advantages = CREDIT[algo.type](rewards, counted, **options)
    scored = msgspec.structs.replace(group, advantages=tuple(advantages.tolist()))
    return scored, can_teach(algo.type, rewards, counted, advantages)


def shape(rewards: np.ndarray, counted: np.ndarray, group: Group, algo: CreditSection) -> np.ndarray:
    """Rewards less what their lengths cost; what is recorded and reported stays the environment's reward."""
    if algo.overlong is not None:
        rewards = overlong(rewards, output_tokens(group), **algo.overlong.model_dump())
    if (section := algo.length_penalty) is not None:
        lengths = {
            "output": output_tokens(group),
            "input": np.array([r.num_tokens for r in group.rollouts]) - output_tokens(group),
            "turns": np.array([r.num_turns for r in group.rollouts]),
        }
        weights = {kind: getattr(section, f"{kind}_weight") for kind in lengths}
        rewards = length_penalty(rewards, counted, lengths, weights)
    return rewards


def output_tokens(group: Group) -> np.ndarray:
    """Sampled tokens of every member, over all its branches."""
    return np.array([rollout.num_sampled_tokens for rollout in group.rollouts])
