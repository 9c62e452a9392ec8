"""Running mean rewards of each agent of an environment: the baselines of `rae`.

The groups of a batch are compared in draw order, beginning with the baselines after the batch before, and the
baselines are updated when the batch is shipped. So they do not depend on which group finishes first. They are saved
with the checkpoint of their step, and a resumed run continues like one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stretto.algorithms.credit import role_conditioned
from stretto.config.sections.algorithm import RaeAlgo
from stretto.orchestrator.groups.credit import advantage_fields, agent_view, shape_rewards, trained_agents
from stretto.records.rollout import Group

AgentBaselines = dict[str, dict[str, float]]
"""Baseline by environment and agent."""


@dataclass(eq=False)
class Baselines:
    """The baselines of the environments whose advantage estimator is `rae`."""

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
        return msgspec.structs.replace(group, **advantage_fields(table)) if table else group
