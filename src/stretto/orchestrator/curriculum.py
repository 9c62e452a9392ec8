"""Which task of an environment is drawn next, by what its groups have earned so far.

A draw is a function of (seed, environment, draw number, pools). The pools change at one moment only: when a
version is loaded, they take in the groups whose fate its batch decided (trained, or turned away before
it was full). So they are the same whoever finishes first, are saved with the checkpoint of that
step, and a resumed run draws as one that was never interrupted would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stretto.base.errors import ConfigError
from stretto.config.curriculum import DifficultySampler
from stretto.envs.base import TaskSource
from stretto.records.rollout import Task

State = dict[str, dict[str, float]]
"""Running reward by environment and task id."""
Observation = tuple[str, str, float]
"""Environment, task id, mean reward of a group."""

UNSEEN, HARD, NORMAL, EASY = range(4)
POOLS = ("unseen", "hard", "normal", "easy")


class DifficultyPools:
    """The tasks of one environment in four pools: never drawn, hard, normal, easy."""

    def __init__(self, env: str, source: TaskSource, cfg: DifficultySampler) -> None:
        if source.num_tasks is None:
            raise ConfigError(
                f"[orchestrator.env.curriculum] difficulty_pool: environment {env!r} has no end of tasks, none is "
                'met twice; use sampler = {type = "standard"}, or bound its tasks by its args.'
            )
        self.cfg = cfg
        self._source = source
        self._index = _index_of(env, source)
        self.rewards: dict[str, float] = {}
        self._pool = np.full(source.num_tasks, UNSEEN, dtype=np.int8)
        self._members: list[np.ndarray] = []
        self._chances = np.empty(0)
        self._settle()

    def draw(self, rng: np.random.Generator) -> Task:
        """A task; its chance is its pool's weight over the sum of all tasks' weights."""
        members = self._members[int(np.searchsorted(self._chances, rng.random(), side="right"))]
        return self._source.task(int(members[rng.integers(len(members))]))

    def observe(self, rewards: Iterable[tuple[str, float]]) -> None:
        """Mean rewards of groups, in draw order."""
        keep = self.cfg.momentum
        for task_id, reward in rewards:
            before = self.rewards.get(task_id)
            self.rewards[task_id] = reward if before is None else keep * before + (1 - keep) * reward
            self._pool[self._index[task_id]] = self.pool_of(self.rewards[task_id])
        self._settle()

    def restore(self, rewards: Mapping[str, float]) -> None:
        """Begin with these running rewards; tasks that are no longer there are forgotten."""
        self.rewards = {task_id: reward for task_id, reward in rewards.items() if task_id in self._index}
        for task_id, reward in self.rewards.items():
            self._pool[self._index[task_id]] = self.pool_of(reward)
        self._settle()

    def pool_of(self, reward: float) -> int:
        if reward <= self.cfg.hard_threshold:
            return HARD
        return NORMAL if reward <= self.cfg.easy_threshold else EASY

    def sizes(self) -> dict[str, int]:
        """Tasks in each pool."""
        return {name: len(members) for name, members in zip(POOLS, self._members)}

    def _settle(self) -> None:
        """Members and chances of the pools; when all weights are 0, every task is as likely."""
        self._members = [np.flatnonzero(self._pool == pool) for pool in range(len(POOLS))]
        weights = np.array([1.0, self.cfg.hard_weight, self.cfg.normal_weight, self.cfg.easy_weight])
        sizes = np.array([len(members) for members in self._members], dtype=np.float64)
        shares = weights * sizes if (weights * sizes).any() else sizes
        chances = np.cumsum(shares) / shares.sum()
        chances[np.flatnonzero(shares)[-1] :] = 1.0  # rounding must not leave room behind the last one
        self._chances = chances


def _index_of(env: str, source: TaskSource) -> dict[str, int]:
    """Index by task id.

    Raises: ConfigError where two tasks have one id.
    """
    index: dict[str, int] = {}
    for number in range(source.num_tasks or 0):
        task_id = source.task(number).task_id
        if index.setdefault(task_id, number) != number:
            raise ConfigError(
                f"[orchestrator.env.curriculum] difficulty_pool knows a task by its id, and environment {env!r} gives "
                f"tasks {index[task_id]} and {number} the same, {task_id!r}; make task_id unique."
            )
    return index


@dataclass(eq=False)
class Curriculum:
    """The pools of all environments that have them, and what they have not yet taken in."""

    pools: Mapping[str, DifficultyPools] = field(default_factory=dict)
    _pending: dict[int, list[Observation]] = field(default_factory=dict)

    def observe(self, step: int, groups: Iterable[Observation]) -> None:
        """The batch of `step` is decided, and these groups with it."""
        mine = [each for each in groups if each[0] in self.pools]
        if mine:
            self._pending[step] = mine

    def advance(self, version: int) -> None:
        """Draws from now on know the groups of all batches up to `version`."""
        for step in sorted(step for step in self._pending if step <= version):
            observations = self._pending.pop(step)
            for env, pools in self.pools.items():
                pools.observe((task, reward) for name, task, reward in observations if name == env)

    def state_at(self, step: int) -> State:
        """What the checkpoint of `step` saves: the pools as they are once that version is loaded."""
        state = {env: dict(pools.rewards) for env, pools in self.pools.items()}
        for pending in sorted(each for each in self._pending if each <= step):
            for env, task, reward in self._pending[pending]:
                keep, before = self.pools[env].cfg.momentum, state[env].get(task)
                state[env][task] = reward if before is None else keep * before + (1 - keep) * reward
        return state

    def restore(self, state: State) -> None:
        """Take over a checkpoint's state, before anything is drawn; tasks that are gone are forgotten."""
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
