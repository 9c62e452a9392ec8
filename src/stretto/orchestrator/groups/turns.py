"""Credit per turn: advantages of single turns beside those of their rollouts.

An environment may say of each turn what it earned, and of the state before it what it is worth and which it is
(`RolloutResult.turn_rewards`, `state_values`, `states`). A chain is the turns of one agent of one member in the order
of their requests, or of one branch if branches have rewards of their own. Its last turn has the reward of the rollout
too. Members that are not counted have no chain. Of a truncated one the reward is that of its last turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stretto.algorithms.advantages import discounted_returns, gae
from stretto.algorithms.credit import among_equals
from stretto.base.errors import ConfigError
from stretto.config.sections.algorithm import Algo, CreditSection, TurnCredit, ValuesCredit
from stretto.orchestrator.groups.advantages import (
    agent_view,
    branch_view,
    has_branch_rewards,
    shape_rewards,
    trained_agents,
)
from stretto.records.rollout import Group, Rollout, RolloutStatus

if TYPE_CHECKING:
    from jaxtyping import Float64

MAKES_REWARDS = ("ppo", "reinforce_plus_plus")
"""Algos of which the trainer may make advantages of rewards, [trainer.advantages]."""
NEEDED = {"returns": "turn_rewards", "values": "state_values", "states": "states"}
"""What the environment must give, by type of credit."""


class Chain(NamedTuple):
    """Turns that follow each other, with the reward of their end."""

    member: int
    turns: list[int]
    reward: float


def credit_turns(group: Group, algo: Algo, path: str = "orchestrator.algo") -> Group:
    """The group with advantages of turns, if the algo credits them, or with their rewards, if the trainer does.

    `path` is the config path of the algo, for messages.

    Raises: ConfigError if the environment does not give what the algo needs.
    """
    rollouts = group.rollouts
    if algo.type in MAKES_REWARDS and any(rollout.turns for rollout in rollouts):
        rewards = tuple(tuple(turn.reward or 0.0 for turn in rollout.turns) for rollout in rollouts)
        group = msgspec.structs.replace(group, turn_rewards=rewards)
    if not isinstance(algo, CreditSection) or (section := algo.turns) is None:
        return group
    _check_given(group, section, f"{path}.turns")
    table = [np.zeros(len(rollout.turns)) for rollout in rollouts]
    for chains in chains_of(group, algo):
        if not chains:
            continue
        values = section.weight * turn_advantages(rollouts, chains, section)
        for chain, part in zip(chains, np.split(values, np.cumsum([len(chain.turns) for chain in chains])[:-1])):
            table[chain.member][chain.turns] = part
    return _weighted(group, section.rollout_weight, tuple(tuple(each.tolist()) for each in table))


def turn_advantages(
    rollouts: tuple[Rollout, ...], chains: list[Chain], section: TurnCredit
) -> Float64[np.ndarray, " turns"]:
    """The advantages of all turns of these chains, which are compared with each other, in their order."""
    turns = [[rollouts[chain.member].turns[n] for n in chain.turns] for chain in chains]
    lengths = np.array([len(each) for each in turns])
    rewards = np.array([turn.reward or 0.0 for each in turns for turn in each])
    rewards[np.cumsum(lengths) - 1] += [chain.reward for chain in chains]
    if isinstance(section, ValuesCredit):
        is_valued = [all(turn.value is not None for turn in each) for each in turns]
        values = np.array([turn.value or 0.0 for each in turns for turn in each])
        advantages, _ = gae(rewards, values, lengths, gamma=section.gamma, lambd=section.lambd)
        return np.where(np.repeat(is_valued, lengths), advantages, 0.0)
    if section.type == "states":
        known: dict[str | None, int] = {None: -1}
        keys = [known.setdefault(turn.state, len(known)) for each in turns for turn in each]
    else:
        keys = [number for length in lengths for number in range(length)]
    returns = discounted_returns(rewards, lengths, section.gamma)
    return among_equals(returns, np.array(keys), normalize_std=getattr(section, "normalize_std", False))


def chains_of(group: Group, algo: CreditSection) -> Iterator[list[Chain]]:
    """The chains of a group that are compared with each other: agent by agent, or all branches with rewards."""
    has_branches = has_branch_rewards(group)
    views = [branch_view(group)] if has_branches else [agent_view(group, agent) for agent in trained_agents(group)]
    for agent, view in zip([None] if has_branches else trained_agents(group), views):
        counted = np.array([rollout.is_counted for rollout in view.rollouts], dtype=bool)
        rewards = np.array([rollout.reward for rollout in view.rollouts], dtype=np.float64)
        chains = []
        for rollout, reward in zip(view.rollouts, shape_rewards(rewards, counted, view, algo)):
            if agent is None:
                turns = sorted({span.turn for b in rollout.branches if b.is_trained for span in b.turns})
            else:
                turns = [number for number, turn in enumerate(rollout.turns) if turn.agent == agent]
            if turns and rollout.turns and rollout.is_counted:
                chains.append(Chain(rollout.member, turns, float(reward)))
        yield chains


def _check_given(group: Group, section: TurnCredit, path: str) -> None:
    """Check that the environment says of turns what the credit is made of.

    An episode that ran into a limit without a result has no turns; one that ended has some.

    Raises: ConfigError.
    """
    counted = [rollout for rollout in group.rollouts if rollout.is_counted]
    column = {"returns": "reward", "values": "value", "states": "state"}[section.type]
    is_given = any(getattr(turn, column) is not None for rollout in counted for turn in rollout.turns)
    if not is_given and any(rollout.status is RolloutStatus.FINISHED for rollout in counted):
        needed = NEEDED[section.type]
        raise ConfigError(
            f'{path}.type = "{section.type}" needs {needed} of the environment {group.task.env!r}, and its results '
            f"have none; return RolloutResult({needed}=[...]) with an entry per reply, or leave {path} out"
        )


def _weighted(group: Group, weight: float, turns: tuple[tuple[float, ...], ...]) -> Group:
    """The group with these advantages of turns, and with those of its rollouts times `weight`."""
    group = msgspec.structs.replace(group, turn_advantages=turns)
    if weight == 1:
        return group
    return msgspec.structs.replace(
        group,
        advantages=tuple(weight * each for each in group.advantages),
        agent_advantages={k: tuple(weight * each for each in v) for k, v in group.agent_advantages.items()},
        branch_advantages=tuple(tuple(weight * each for each in v) for v in group.branch_advantages),
    )
