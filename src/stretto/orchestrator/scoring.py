"""A finished group gets its advantages.

Rewards were given by the environment; they are shaped by length where [algo] says so, and compared: the
members of a group within one agent, where several play.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from stretto.algorithms.credit import CREDIT, can_teach, hierarchical_grpo, length_penalty, overlong
from stretto.algorithms.custom import CreditInputs, custom_credit
from stretto.base.errors import ConfigError
from stretto.config.algorithm import Algo, CreditSection, CustomAlgo, HierarchicalGrpoAlgo
from stretto.config.distill import WITHOUT_REWARD
from stretto.config.orchestrator import SamplingSection
from stretto.envs.base import Environment, SingleTurnEnv
from stretto.records.rollout import Group, Rollout, RolloutStatus

COUNTED = (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED)
SHAPING = {"type", "length_penalty", "overlong", "decay", "whiten", "tool", "user", "system", "filter"}
"""Keys of an algo that are not options of its rule."""


def check_overlong(env: Environment, algo: Algo, sampling: SamplingSection, place: str) -> None:
    """A penalty that the one reply of an environment can incur.

    Raises: ConfigError where no reply is long enough.
    """
    section, longest = getattr(algo, "overlong", None), sampling.max_completion_tokens
    if section is None or longest is None or not isinstance(env, SingleTurnEnv):
        return
    start = section.max_tokens - section.buffer_tokens
    if longest <= start:
        raise ConfigError(
            f"{place}.overlong.max_tokens = {section.max_tokens}: the penalty would begin after {start} tokens, and "
            f"{env.name} has one reply, of at most max_completion_tokens = {longest}; lower max_tokens."
        )


def is_counted(rollout: Rollout) -> bool:
    """Does this rollout belong to its group's baseline and to the batch?"""
    return rollout.status in COUNTED


def is_distilled(rollout: Rollout) -> bool:
    """Is something learned from this rollout whatever its advantage: from a teacher, or by cross-entropy?"""
    return any(
        branch.ref_logprobs is not None or branch.is_frozen or branch.ce_weights is not None
        for branch in rollout.branches
        if branch.is_trained
    )


def score(group: Group, algo: Algo, place: str = "orchestrator.algo") -> tuple[Group, bool]:
    """The group with its advantages (0 for failed members), and whether it has a signal.

    `place` is where the algo stands, for messages.

    Where several agents are trained each member has one advantage an agent; the one that is largest in size is
    what gates, filters and the ledger see.
    """
    has_lesson = any(is_counted(rollout) and is_distilled(rollout) for rollout in group.rollouts)
    if algo.type in WITHOUT_REWARD:
        return msgspec.structs.replace(group, advantages=(0.0,) * len(group.rollouts)), has_lesson
    if isinstance(algo, HierarchicalGrpoAlgo):
        table = compare_roles(group, algo, place)
        if not table:  # all members failed, or nobody who is trained spoke
            return msgspec.structs.replace(group, advantages=(0.0,) * len(group.rollouts)), False
        has_signal = any(advantages.any() for advantages in table.values())
        return msgspec.structs.replace(group, **largest(table)), has_signal
    if is_alone(group):
        advantages, has_signal = compare(group, algo, place)
        return msgspec.structs.replace(group, advantages=tuple(advantages.tolist())), has_signal or has_lesson
    parts = {agent: compare(played_by(group, agent), algo, place) for agent in speakers(group)}
    table = {agent: advantages for agent, (advantages, _) in parts.items()}
    has_signal = has_lesson or any(has_signal for _, has_signal in parts.values())
    return msgspec.structs.replace(group, **largest(table)), has_signal


def largest(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """The two fields of a group that hold its advantages, from those of each agent."""
    values = np.stack(list(table.values()))
    of_rollouts = values[np.abs(values).argmax(axis=0), np.arange(values.shape[1])]
    by_agent = {agent: tuple(each.tolist()) for agent, each in table.items()} if len(table) > 1 else {}
    return {"advantages": tuple(of_rollouts.tolist()), "agent_advantages": by_agent}


def compare(group: Group, algo: Algo, place: str) -> tuple[np.ndarray, bool]:
    """Advantages of the members of a group that one agent played, and whether they teach it anything."""
    rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    counted = np.array([is_counted(rollout) for rollout in group.rollouts], dtype=bool)
    if isinstance(algo, CreditSection):
        rewards = shape(rewards, counted, group, algo)
    if isinstance(algo, CustomAlgo):
        advantages = custom_credit(algo, CreditInputs(rewards, counted, group), place)
    else:
        options = algo.model_dump(exclude=SHAPING)
        advantages = CREDIT[algo.type](rewards, counted, **options)
    return advantages, can_teach(algo.type, rewards, counted, advantages)


def compare_roles(group: Group, algo: HierarchicalGrpoAlgo, place: str) -> dict[str, np.ndarray]:
    """Advantages of the members by player, each role compared by itself.

    Raises: ConfigError when nobody plays any of the roles that are compared within their episode.
    """
    players: dict[str, list[str]] = {}
    for player in speakers(group):
        players.setdefault(player.partition("/")[0], []).append(player)
    if players and not set(players) & set(algo.episode_agents):
        raise ConfigError(
            f"{place}.episode_agents = {list(algo.episode_agents)}: the agents of "
            f"{group.task.env!r} are {sorted(players)}; name those that play several times in an episode"
        )
    table = {}
    for role, names in players.items():
        parts = [played_by(group, name) for name in names]
        counted = np.array([[is_counted(r) for r in part.rollouts] for part in parts], dtype=bool).T
        paid = [np.array([r.reward for r in part.rollouts], dtype=np.float64) for part in parts]
        rewards = np.stack([shape(*each, algo) for each in zip(paid, counted.T, parts)], axis=1)
        advantages = hierarchical_grpo(rewards, counted, is_within_episode=role in algo.episode_agents)
        table |= dict(zip(names, advantages.T))
    return table


def is_alone(group: Group) -> bool:
    """Did one policy play alone, paid with the rollouts' rewards? There is then nothing to tell apart."""
    branches = [branch for rollout in group.rollouts for branch in rollout.branches]
    agents = {(branch.agent, branch.is_trained) for branch in branches}
    has_own_rewards = any(rollout.agent_rewards for rollout in group.rollouts)
    return not speakers(group) or (len(agents) < 2 and not has_own_rewards)


def speakers(group: Group) -> list[str]:
    """The agents that are learned from, in the order in which they spoke first."""
    branches = (branch for rollout in group.rollouts for branch in rollout.branches)
    return list(dict.fromkeys(branch.agent for branch in branches if branch.is_trained))


def played_by(group: Group, agent: str) -> Group:
    """The group as one agent saw it: its branches and its rewards.

    A member in which it never spoke is no part of its baseline.
    """
    return msgspec.structs.replace(group, rollouts=tuple(_part_of(r, agent) for r in group.rollouts))


def _part_of(rollout: Rollout, agent: str) -> Rollout:
    branches = tuple(branch for branch in rollout.branches if branch.agent == agent and branch.is_trained)
    status = rollout.status if branches or not is_counted(rollout) else RolloutStatus.DROPPED
    return msgspec.structs.replace(
        rollout, branches=branches, reward=rollout.reward_of(agent), agent_rewards={}, status=status
    )


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
