"""What each agent of an environment usually earns: the baselines of `rae`.

A batch is compared with the baselines as the batch before it left them, group by group in the order of their
numbers, and moves them when it is shipped. So they are the same whichever group finishes first, are saved with the
checkpoint of their step, and a resumed run goes on as one that was never interrupted would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stretto.algorithms.credit import role_conditioned
from stretto.config.algorithm import RaeAlgo
from stretto.orchestrator.scoring import is_counted, largest, played_by, shape, speakers
from stretto.records.rollout import Group

State = dict[str, dict[str, float]]
"""Baseline by environment and agent."""


@dataclass(eq=False)
class Baselines:
    """The baselines of the environments whose credit is `rae`."""

    algos: Mapping[str, RaeAlgo] = field(default_factory=dict)
    """By environment; others are left alone."""
    _values: State = field(default_factory=dict)
    _moved: State = field(default_factory=dict)  # by the latest `subtract`
    _at_step: dict[int, State] = field(default_factory=dict)

    def subtract(self, groups: Iterable[Group]) -> list[Group]:
        """The groups of a batch, in draw order, with rewards less baselines as advantages.

        The baselines stay where they are until `commit`: the batch may yet be lost.
        """
        self._moved = {env: dict(values) for env, values in self._values.items()}
        return [self._settle(group) for group in sorted(groups, key=lambda group: group.group_id)]

    def commit(self, step: int) -> None:
        """The batch of the latest `subtract` is shipped as that of `step`, and moves the baselines."""
        self._values = self._moved
        if self.algos:
            self._at_step[step] = self._values

    def state_at(self, step: int) -> State:
        """What the checkpoint of `step` saves; earlier steps are forgotten."""
        self._at_step = {each: state for each, state in self._at_step.items() if each >= step}
        return self._at_step.get(step, {})

    def restore(self, state: State) -> None:
        """Take over a checkpoint's state, before any batch is made."""
        self._values = {env: dict(values) for env, values in state.items() if env in self.algos}

    def gauges(self) -> dict[str, float]:
        """Baselines as metrics."""
        return {
            f"baseline/{env}/{agent}": value
            for env, values in self._values.items()
            for agent, value in values.items()
        }

    def _settle(self, group: Group) -> Group:
        algo = self.algos.get(group.task.env)
        if algo is None:
            return group
        values = self._moved.setdefault(group.task.env, {})
        table: dict[str, np.ndarray] = {}
        for agent in speakers(group):
            mine = played_by(group, agent)
            rewards = np.array([rollout.reward for rollout in mine.rollouts], dtype=np.float64)
            counted = np.array([is_counted(rollout) for rollout in mine.rollouts], dtype=bool)
            table[agent], values[agent] = role_conditioned(
                shape(rewards, counted, mine, algo),
                counted,
                baseline=values.get(agent, 0.0),
                decay=algo.decay,
            )
        return msgspec.structs.replace(group, **largest(table)) if table else group
