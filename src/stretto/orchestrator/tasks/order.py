"""The n-th task of a run: a pure function of seed and n, so the data cursor is one number.

Environments alternate in a fixed cycle of up to 1000 draws, which keeps their ratios exactly and mixes them evenly.
Tasks of one environment come in index order if there are infinitely many or if it says that they are ordered;
otherwise in a new shuffle per epoch. A shuffle is computed element by element: it needs no memory, and its cost does
not depend on the number of tasks. An environment with pools, which an add-on has, draws from them: then a draw depends
on its number and on the pools.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from math import gcd
from typing import Protocol

import numpy as np

from stretto.base.errors import ConfigError
from stretto.envs.base import Environment, TaskSource, tasks_of
from stretto.envs.workers.pool import WorkerEnv
from stretto.envs.workers.wire import split_and_index
from stretto.records.partial import PartialRollout
from stretto.records.rollout import Task

MAX_CYCLE_DRAWS = 1000
SEED_STRIDE = 1 << 32  # tasks; runs with different seeds read different parts of an infinite source
FEISTEL_ROUNDS = 6  # of a shuffle
WORD_MASK = (1 << 64) - 1


def seed_of(*parts: object) -> int:
    """A 62-bit seed that depends on every part and on nothing else."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


RunningRewards = dict[str, dict[str, float]]
"""Running reward by environment and task id."""
Observation = tuple[str, str, float]
"""Environment, task id, mean reward of a group."""


class Pool(Protocol):
    """An environment's tasks, drawn by what is known of them."""

    def draw(self, rng: np.random.Generator) -> Task:
        """Draw a task."""


class Curriculum(Protocol):
    """The pools of the environments that have them."""

    @property
    def pools(self) -> Mapping[str, Pool]:
        """By environment."""

    def observe(self, step: int, groups: Iterable[Observation]) -> None:
        """The groups that the batch of a step trained or discarded."""

    def advance(self, version: int) -> None:
        """Later draws know all batches up to this step."""

    def state_at(self, step: int) -> RunningRewards:
        """What a checkpoint of this step saves."""

    def gauges(self) -> dict[str, float]:
        """Sizes of pools, as metrics."""


class TaskMix:
    """Draws from several environments' training tasks by ratio."""

    def __init__(
        self, envs: Sequence[Environment], ratios: Sequence[float], seed: int, curriculum: Curriculum | None = None
    ) -> None:
        assert len(envs) == len(ratios) > 0, "a run needs at least one environment"
        names = [env.name for env in envs]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"[[env]] {sorted(repeated)[0]!r} is there twice; give each a `name`.")
        self.envs = {env.name: env for env in envs}
        self._sources = [tasks_of(env, "train") for env in envs]
        self._names, self._pools = names, {} if curriculum is None else curriculum.pools
        self._seed = seed
        self._cycle, self._counts = _cycle_of(ratios)

    def draw(self, k: int) -> Task:
        """The task of draw number k; the same in every process and after every restart."""
        num_cycles, position = divmod(k, len(self._cycle))
        env, num_before = self._cycle[position]
        if pools := self._pools.get(self._names[env]):
            return pools.draw(np.random.default_rng(seed_of("pool", self._seed, env, k)))
        return self._task(self._sources[env], env, num_cycles * self._counts[env] + num_before)

    def playable(self, task: Task) -> Task:
        """A recorded task as the environment can play it now.

        The orchestrator has only split and index of a task whose episodes worker processes play. A run that is
        resumed without them takes the environment's own task there; workers find their own.
        """
        env, found = self.envs.get(task.env), split_and_index(task)
        if env is None or found is None or isinstance(env, WorkerEnv):
            return task
        return tasks_of(env, found[0]).task(found[1])

    def _task(self, source: TaskSource, env: int, index: int) -> Task:
        if source.num_tasks is None:
            return source.task(self._seed * SEED_STRIDE + index)
        if source.is_ordered:
            return source.task(index)
        epoch, position = divmod(index, source.num_tasks)
        seed = seed_of("epoch", self._seed, env, epoch)
        return source.task(shuffled_index(position, source.num_tasks, seed))


def shuffled_index(position: int, count: int, seed: int) -> int:
    """The number at `position` of a permutation of range(count).

    A Feistel network permutes the numbers below the next power of 4; results at `count` or above go through it
    again, fewer than 4 times on average. Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains,
    2002, cycle walking.
    """
    assert 0 <= position < count
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [_mix_bits(seed + number) for number in range(FEISTEL_ROUNDS)]
    while True:
        left, right = position >> half, position & mask
        for key in keys:
            left, right = right, left ^ (_mix_bits(right ^ key) & mask)
        position = left << half | right
        if position < count:
            return position


def _mix_bits(x: int) -> int:
    """64 bits, each of which depends on all of x.

    Source: the finalizer of splitmix64, Steele et al., OOPSLA 2014.
    """
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD_MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD_MASK
    return x ^ x >> 31


def _cycle_of(ratios: Sequence[float]) -> tuple[list[tuple[int, int]], list[int]]:
    """The draws of a cycle as (environment, its earlier draws), and draws per environment."""
    total = sum(ratios)
    shares = [max(round(MAX_CYCLE_DRAWS * ratio / total), 1) for ratio in ratios]
    divisor = gcd(*shares)
    counts = [share // divisor for share in shares]
    # The j-th of c draws of an environment falls at (j + 1/2) / c of the cycle; fractions make ties exact.
    midpoints = [(Fraction(2 * j + 1, 2 * c), env, j) for env, c in enumerate(counts) for j in range(c)]
    return [(env, j) for _, env, j in sorted(midpoints)], counts


@dataclass
class Cursor:
    """The next draws: first those that an earlier incarnation left unfinished, then new ones."""

    next_draw: int
    redraws: deque[tuple[int, Task]]
    partials: dict[tuple[int, int], PartialRollout] = field(default_factory=dict)  # by draw and member

    def next(self, mix: TaskMix) -> tuple[int, Task, bool]:
        """Advance to the next draw; its number, its task, and whether it is new to the ledger."""
        if self.redraws:
            return *self.redraws.popleft(), False
        self.next_draw += 1
        return self.next_draw - 1, mix.draw(self.next_draw - 1), True
