"""Difficulty pools: draws an environment's tasks by their rewards so far.

A draw is a function of (seed, environment, draw number, pools). The pools change only when a version is loaded:
then they get the rewards of the groups that its batch trained or discarded. So they do not depend on which group
finishes first. They are saved with the checkpoint of that step, and a resumed run draws like one that was never
interrupted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.base.errors import ConfigError
from stretto.config.sections.curriculum import DifficultySampler
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.envs.base import Environment, TaskSource, tasks_of
from stretto.orchestrator.tasks.order import Observation, RunningRewards
from stretto.records.rollout import Task

UNSEEN = 0
"""Index of the pool of tasks that were never drawn; the others follow, by threshold."""


class DifficultyPools:
    """The tasks of one environment in pools: never drawn, and by running reward, as hard, normal and easy."""

    def __init__(self, env: str, source: TaskSource, cfg: DifficultySampler) -> None:
        if source.num_tasks is None:
            raise ConfigError(
                f"[orchestrator.env.curriculum] difficulty_pool: environment {env!r} has infinitely many tasks, none "
                'is drawn twice; use sampler = {type = "standard"}, or limit its tasks by its args.'
            )
        self.cfg = cfg
        names, self._thresholds, weights = zip(*cfg.ordered)
        self._names, self._weights = ("unseen", *names), np.array([1.0, *weights])
        self._source = source
        self._index = _index_of(env, source)
        self.rewards: dict[str, float] = {}
        self._pool = np.full(source.num_tasks, UNSEEN, dtype=np.int16)
        self._members: list[np.ndarray] = []
        self._chances = np.empty(0)
        self._update_pools()

    def draw(self, rng: np.random.Generator) -> Task:
        """Draw a task; its probability is its pool's weight over the sum of all tasks' weights."""
        members = self._members[int(np.searchsorted(self._chances, rng.random(), side="right"))]
        return self._source.task(int(members[rng.integers(len(members))]))

    def observe(self, rewards: Iterable[tuple[str, float]]) -> None:
        """Update the running rewards by mean rewards of groups (task id, reward), in draw order."""
        momentum = self.cfg.momentum
        for task_id, reward in rewards:
            if task_id not in self._index:  # drawn before a resume with other tasks, as in `restore`
                continue
            before = self.rewards.get(task_id)
            self.rewards[task_id] = _running_reward(before, reward, momentum)
            self._pool[self._index[task_id]] = self.pool_of(self.rewards[task_id])
        self._update_pools()

    def restore(self, rewards: Mapping[str, float]) -> None:
        """Load these running rewards; those of tasks that no longer exist are ignored."""
        self.rewards = {task_id: reward for task_id, reward in rewards.items() if task_id in self._index}
        for task_id, reward in self.rewards.items():
            self._pool[self._index[task_id]] = self.pool_of(reward)
        self._update_pools()

    def pool_of(self, reward: float) -> int:
        """The pool of a task with this running reward."""
        found = bisect.bisect_left(self._thresholds, reward)  # the first whose threshold is not below it
        return 1 + min(found, len(self._thresholds) - 1)

    def sizes(self) -> dict[str, int]:
        """Number of tasks in each pool."""
        return {name: len(members) for name, members in zip(self._names, self._members)}

    def _update_pools(self) -> None:
        """Recompute members and probabilities of the pools; uniform if all weights are 0."""
        self._members = [np.flatnonzero(self._pool == pool) for pool in range(len(self._names))]
        sizes = np.array([len(members) for members in self._members], dtype=np.float64)
        shares = self._weights * sizes if (self._weights * sizes).any() else sizes
        chances = np.cumsum(shares) / shares.sum()
        # A rounding error must not leave a random number without a pool.
        chances[np.flatnonzero(shares)[-1] :] = 1.0
        self._chances = chances


def _index_of(env: str, source: TaskSource) -> dict[str, int]:
    """The index of each task by its id.

    Raises: ConfigError if two tasks have the same id.
    """
    index: dict[str, int] = {}
    for number in range(source.num_tasks or 0):
        task_id = source.task(number).task_id
        if index.setdefault(task_id, number) != number:
            raise ConfigError(
                f"[orchestrator.env.curriculum] difficulty_pool identifies a task by its id, and environment {env!r} "
                f"gives tasks {index[task_id]} and {number} the same, {task_id!r}; make task_id unique."
            )
    return index


def _running_reward(before: float | None, reward: float, momentum: float) -> float:
    """The running reward of a task after another group; None before its first."""
    return reward if before is None else momentum * before + (1 - momentum) * reward


def build(cfg: OrchestratorSection, envs: Sequence[Environment], saved: RunningRewards) -> Curriculum:
    """Build the pools of the environments whose config asks for them; saved: the state of a checkpoint.

    Raises: ConfigError for an environment that cannot have pools.
    """
    samplers = [cfg.curriculum_of(section).sampler for section in cfg.env]
    curriculum = Curriculum(
        {
            env.name: DifficultyPools(env.name, tasks_of(env, "train"), sampler)
            for env, sampler in zip(envs, samplers, strict=True)
            if isinstance(sampler, DifficultySampler)
        }
    )
    curriculum.restore(saved)
    return curriculum


@dataclass(eq=False)
class Curriculum:
    """The pools of all environments that have them, and observations not yet applied to them."""

    pools: Mapping[str, DifficultyPools] = field(default_factory=dict)
    _pending: dict[int, list[Observation]] = field(default_factory=dict)

    def observe(self, step: int, groups: Iterable[Observation]) -> None:
        """Remember the mean rewards of the groups that the batch of `step` trained or discarded."""
        observed = [each for each in groups if each[0] in self.pools]
        if observed:
            self._pending[step] = observed

    def advance(self, version: int) -> None:
        """Update the pools that later draws use by all batches up to step `version`."""
        for step in sorted(step for step in self._pending if step <= version):
            by_env: dict[str, list[tuple[str, float]]] = {}
            for env, task, reward in self._pending.pop(step):
                by_env.setdefault(env, []).append((task, reward))
            for env, observations in by_env.items():
                self.pools[env].observe(observations)

    def state_at(self, step: int) -> RunningRewards:
        """The running rewards after version `step` is loaded, which its checkpoint saves."""
        state = {env: dict(pools.rewards) for env, pools in self.pools.items()}
        for pending in sorted(each for each in self._pending if each <= step):
            for env, task, reward in self._pending[pending]:
                state[env][task] = _running_reward(state[env].get(task), reward, self.pools[env].cfg.momentum)
        return state

    def restore(self, state: RunningRewards) -> None:
        """Load a checkpoint's state before the first draw; tasks that no longer exist are ignored."""
        for env, rewards in state.items():
            if env in self.pools:
                self.pools[env].restore(rewards)

    def gauges(self) -> dict[str, float]:
        """Pool sizes as metrics."""
        return {
            f"curriculum/{env}/{pool}": float(size)
            for env, pools in self.pools.items()
            for pool, size in pools.sizes().items()
        }
