"""Assigns advantages to the members of a played group.

The environment's rewards are shaped by length if [algo] says so; then the advantage estimator compares the members.
If several agents play, it compares them agent by agent; branches with rewards of their own are compared like members.
`Baselines` are the state of the one estimator that has any, `rae`, which compares a member with earlier groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.algorithms.credit import (
    ADVANTAGE_ESTIMATORS,
    has_group_signal,
    hierarchical_grpo,
    length_penalty,
    overlong,
    role_conditioned,
)
from stretto.algorithms.custom import CreditInputs, custom_credit
from stretto.base.errors import ConfigError
from stretto.config.sections.algorithm import Algo, CreditSection, CustomAlgo, HierarchicalGrpoAlgo, RaeAlgo
from stretto.config.sections.distill import WITHOUT_REWARD
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import Environment, SingleTurnEnv
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

NO_ESTIMATOR_OPTIONS = {
    "type", "turns", "length_penalty", "overlong", "decay", "whiten", "tool", "user", "system", "filter",
}  # fmt: skip
"""Keys of an algo section that are not options of its advantage estimator."""


def check_overlong(env: Environment, algo: Algo, sampling: SamplingSection, path: str) -> None:
    """Check that single-turn replies can be long enough for the overlong penalty.

    Raises: ConfigError if they cannot.
    """
    section, longest = getattr(algo, "overlong", None), sampling.max_completion_tokens
    if section is None or longest is None or not isinstance(env, SingleTurnEnv):
        return
    start = section.max_tokens - section.buffer_tokens
    if longest <= start:
        raise ConfigError(
            f"{path}.overlong.max_tokens = {section.max_tokens}: the penalty would begin after {start} tokens, and "
            f"{env.name} has one reply, of at most max_completion_tokens = {longest}; lower max_tokens."
        )


def assign_advantages(group: Group, algo: Algo, path: str = "orchestrator.algo") -> tuple[Group, bool]:
    """The group with its advantages (0 for failed members), and whether it has a signal.

    `path` is the config path of the algo, for messages. If several agents are trained, each member has one
    advantage per agent; gates, filters and the ledger see the one of largest magnitude.
    """
    if algo.type in WITHOUT_REWARD:
        return msgspec.structs.replace(group, advantages=(0.0,) * len(group.rollouts)), is_distilled(group)
    if has_branch_rewards(group):
        return compare_branches(group, algo, path)
    if isinstance(algo, HierarchicalGrpoAlgo):
        table = hierarchical_advantages(group, algo, path)
        if not table:  # all members failed, or no trained agent replied
            return msgspec.structs.replace(group, advantages=(0.0,) * len(group.rollouts)), False
        has_signal = any(advantages.any() for advantages in table.values())
        return msgspec.structs.replace(group, **advantage_fields(table)), has_signal
    if has_single_agent(group):
        advantages, has_signal = advantages_of(group, algo, path)
        group = msgspec.structs.replace(group, advantages=tuple(advantages.tolist()))
        return group, has_signal or is_distilled(group)
    by_agent = {agent: advantages_of(agent_view(group, agent), algo, path) for agent in trained_agents(group)}
    table = {agent: advantages for agent, (advantages, _) in by_agent.items()}
    has_signal = any(has_signal for _, has_signal in by_agent.values()) or is_distilled(group)
    return msgspec.structs.replace(group, **advantage_fields(table)), has_signal


def is_distilled(group: Group) -> bool:
    """Is a counted member trained even if its advantage is 0?"""
    return any(rollout.is_counted and rollout.is_distilled for rollout in group.rollouts)


def has_branch_rewards(group: Group) -> bool:
    """Has a trained branch of a counted member a reward of its own?"""
    return any(
        branch.reward is not None and branch.is_trained and rollout.is_counted
        for rollout in group.rollouts
        for branch in rollout.branches
    )


def compare_branches(group: Group, algo: Algo, path: str) -> tuple[Group, bool]:
    """The group with an advantage per branch, and whether it has a signal.

    All branches of all members are compared with each other, as if each were a member.
    """
    view = branch_view(group)
    values, has_signal = advantages_of(view, algo, path)
    by_branch = tuple(
        tuple(float(value) for part, value in zip(view.rollouts, values) if part.branches and part.member == member)
        for member in range(len(group.rollouts))
    )
    largest = tuple(max(each, key=abs, default=0.0) for each in by_branch)
    return msgspec.structs.replace(group, advantages=largest, branch_advantages=by_branch), has_signal


def branch_view(group: Group) -> Group:
    """The group with a member for each branch, which has the branch's reward; then those without a branch."""
    parts = [
        msgspec.structs.replace(rollout, member=member, branches=(branch,), reward=_reward_of(rollout, branch))
        for member, rollout in enumerate(group.rollouts)
        for branch in rollout.branches
    ]
    failed = [rollout for rollout in group.rollouts if not rollout.branches]
    return msgspec.structs.replace(group, rollouts=(*parts, *failed))


def _reward_of(rollout: Rollout, branch: Branch) -> float:
    return rollout.reward_of(branch.agent) if branch.reward is None else branch.reward


def advantage_fields(table: dict[str, Float[np.ndarray, " members"]]) -> dict[str, Any]:
    """Both advantage fields of a group, from the members' advantages by agent."""
    values = np.stack(list(table.values()))
    largest = values[np.abs(values).argmax(axis=0), np.arange(values.shape[1])]
    by_agent = {agent: tuple(each.tolist()) for agent, each in table.items()} if len(table) > 1 else {}
    return {"advantages": tuple(largest.tolist()), "agent_advantages": by_agent}


def advantages_of(group: Group, algo: Algo, path: str) -> tuple[Float[np.ndarray, " members"], bool]:
    """Advantages of the members of a group that one agent played, and whether it has a signal."""
    rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    counted = np.array([rollout.is_counted for rollout in group.rollouts], dtype=bool)
    if isinstance(algo, CreditSection) and (algo.overlong or algo.length_penalty):
        rewards = shape_rewards(rewards, counted, group, algo)
    if isinstance(algo, CustomAlgo):
        advantages = custom_credit(algo, CreditInputs(rewards, counted, group), path)
    else:
        options = algo.model_dump(exclude=NO_ESTIMATOR_OPTIONS)
        advantages = ADVANTAGE_ESTIMATORS[algo.type](rewards, counted, **options)
    return advantages, has_group_signal(algo.type, rewards, counted, advantages)


def hierarchical_advantages(
    group: Group, algo: HierarchicalGrpoAlgo, path: str
) -> dict[str, Float[np.ndarray, " members"]]:
    """Advantages of the members by agent; agents of one role are compared with each other.

    An agent's role is its name up to the first "/".

    Raises: ConfigError if no agent has a role that is compared within its episode.
    """
    agents_by_role: dict[str, list[str]] = {}
    for agent in trained_agents(group):
        agents_by_role.setdefault(agent.partition("/")[0], []).append(agent)
    if agents_by_role and not set(agents_by_role) & set(algo.episode_agents):
        raise ConfigError(
            f"{path}.episode_agents = {list(algo.episode_agents)}: the agents of "
            f"{group.task.env!r} are {sorted(agents_by_role)}; name those that play several times in an episode"
        )
    table: dict[str, np.ndarray] = {}
    for role, agents in agents_by_role.items():
        views = [agent_view(group, agent) for agent in agents]
        counted = np.array([[r.is_counted for r in view.rollouts] for view in views], dtype=bool).T
        env_rewards = [np.array([r.reward for r in view.rollouts], dtype=np.float64) for view in views]
        rewards = np.stack([shape_rewards(*each, algo) for each in zip(env_rewards, counted.T, views)], axis=1)
        advantages = hierarchical_grpo(rewards, counted, is_within_episode=role in algo.episode_agents)
        table |= dict(zip(agents, advantages.T))
    return table


def has_single_agent(group: Group) -> bool:
    """Is there at most one agent, and does it get the rollouts' rewards?"""
    branches = [branch for rollout in group.rollouts for branch in rollout.branches]
    agents = {(branch.agent, branch.is_trained) for branch in branches}
    has_own_rewards = any(rollout.agent_rewards for rollout in group.rollouts)
    return not trained_agents(group) or (len(agents) < 2 and not has_own_rewards)


def trained_agents(group: Group) -> list[str]:
    """The trained agents, in the order of their first reply."""
    branches = (branch for rollout in group.rollouts for branch in rollout.branches)
    return list(dict.fromkeys(branch.agent for branch in branches if branch.is_trained))


def agent_view(group: Group, agent: str) -> Group:
    """The group with only the branches and rewards of one agent.

    A member without a reply of the agent does not count towards its baseline.
    """
    return msgspec.structs.replace(group, rollouts=tuple(_agent_part(r, agent) for r in group.rollouts))


def _agent_part(rollout: Rollout, agent: str) -> Rollout:
    branches = tuple(branch for branch in rollout.branches if branch.agent == agent and branch.is_trained)
    status = rollout.status if branches or not rollout.is_counted else RolloutStatus.DROPPED
    return msgspec.structs.replace(
        rollout, branches=branches, reward=rollout.reward_of(agent), agent_rewards={}, status=status
    )


def shape_rewards(
    rewards: Float[np.ndarray, " members"], counted: Bool[np.ndarray, " members"], group: Group, algo: CreditSection
) -> Float[np.ndarray, " members"]:
    """Rewards minus length penalties; the recorded and reported reward stays the environment's."""
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


def output_tokens(group: Group) -> Int[np.ndarray, " members"]:
    """Number of sampled tokens of each member, over all its branches."""
    return np.array([rollout.num_sampled_tokens for rollout in group.rollouts])


AgentBaselines = dict[str, dict[str, float]]
"""Baseline by environment and agent."""


@dataclass(eq=False)
class Baselines:
    """The baselines of the environments whose advantage estimator is `rae`: running mean rewards of each agent.

    The groups of a batch are compared in draw order, beginning with the baselines after the batch before, and the
    baselines are updated when the batch is shipped. So they do not depend on which group finishes first. They are saved
    with the checkpoint of their step, and a resumed run continues like one that was never interrupted.
    """

    algos: Mapping[str, RaeAlgo] = field(default_factory=dict)
    """By environment; groups of other environments are not changed."""
    _values: AgentBaselines = field(default_factory=dict)
    _updated: AgentBaselines = field(default_factory=dict)  # by the latest `subtract`
    _at_step: dict[int, AgentBaselines] = field(default_factory=dict)

    def subtract(self, groups: Iterable[Group]) -> list[Group]:
        """The groups of a batch, in draw order, with reward minus baseline as advantage.

        The baselines change only with `commit`, because the batch may still be lost.
        """
        self._updated = {env: dict(values) for env, values in self._values.items()}
        return [self._subtract_from_group(group) for group in sorted(groups, key=lambda group: group.group_id)]

    def commit(self, step: int) -> None:
        """Update the baselines by the batch of the latest `subtract`, which is shipped for `step`."""
        self._values = self._updated
        if self.algos:
            self._at_step[step] = self._values

    def state_at(self, step: int) -> AgentBaselines:
        """The baselines that the checkpoint of `step` saves; earlier steps are forgotten."""
        self._at_step = {each: state for each, state in self._at_step.items() if each >= step}
        return self._at_step.get(step, {})

    def restore(self, state: AgentBaselines) -> None:
        """Load a checkpoint's state, before any batch is made."""
        self._values = {env: dict(values) for env, values in state.items() if env in self.algos}

    def gauges(self) -> dict[str, float]:
        """Baselines as metrics."""
        return {
            f"baseline/{env}/{agent}": value for env, values in self._values.items() for agent, value in values.items()
        }

    def _subtract_from_group(self, group: Group) -> Group:
        algo = self.algos.get(group.task.env)
        if algo is None:
            return group
        values = self._updated.setdefault(group.task.env, {})
        table: dict[str, np.ndarray] = {}
        for agent in trained_agents(group):
            view = agent_view(group, agent)
            rewards = np.array([rollout.reward for rollout in view.rollouts], dtype=np.float64)
            counted = np.array([rollout.is_counted for rollout in view.rollouts], dtype=bool)
            table[agent], values[agent] = role_conditioned(
                shape_rewards(rewards, counted, view, algo), counted, baseline=values.get(agent, 0.0), decay=algo.decay
            )
        if algo.turns is not None:
            table = {agent: values * algo.turns.rollout_weight for agent, values in table.items()}
        return msgspec.structs.replace(group, **advantage_fields(table)) if table else group
