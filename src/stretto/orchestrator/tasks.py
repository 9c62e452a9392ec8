"""The n-th task of a run: a pure function of the seed and n, so that the data cursor is one number.

Environments take turns in a fixed cycle of up to 1000 draws that keeps their ratios exactly and mixes them
evenly. Inside an environment tasks come in order of index where there is no end of them, or where it says that
they are ordered, and else in a fresh shuffle an epoch. An environment with difficulty pools (curriculum.py)
draws from those: then a draw depends on its number and on the pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import gcd

import numpy as np

from stretto.base.errors import ConfigError
from stretto.envs.base import Environment, TaskSource, tasks_of
from stretto.orchestrator.curriculum import DifficultyPools
from stretto.records.rollout import Task

CYCLE = 1000
SEED_STRIDE = 1 << 32  # runs with other seeds read an endless source elsewhere


def seed_of(*parts: object) -> int:
    """A 62-bit seed that depends on every part and on nothing else."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class TaskMix:
    """Draws from several environments' training tasks by ratio."""

    def __init__(
        self,
        envs: Sequence[Environment],
        ratios: Sequence[float],
        seed: int,
        pools: Mapping[str, DifficultyPools] | None = None,
    ) -> None:
        assert len(envs) == len(ratios) > 0, "a run needs at least one environment"
        names = [env.name for env in envs]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"[[env]] {sorted(repeated)[0]!r} stands there twice; give each a `name`.")
        self.envs = {env.name: env for env in envs}
        self._sources = [tasks_of(env, "train") for env in envs]
        self._names, self._pools = names, pools or {}
        self._seed = seed
        self._cycle, self._counts = _cycle_of(ratios)

    def draw(self, k: int) -> Task:
        """Draw number k, the same in every process and after every restart."""
        turn, position = divmod(k, len(self._cycle))
        env, rank = self._cycle[position]
        if pools := self._pools.get(self._names[env]):
            return pools.draw(np.random.default_rng(seed_of("pool", self._seed, env, k)))
        return self._task(self._sources[env], env, turn * self._counts[env] + rank)

    def _task(self, source: TaskSource, env: int, index: int) -> Task:
        if source.num_tasks is None:
            return source.task(self._seed * SEED_STRIDE + index)
        if source.is_ordered:
            return source.task(index)
        epoch, position = divmod(index, source.num_tasks)
        order = _shuffled(source.num_tasks, seed_of("epoch", self._seed, env, epoch))
        return source.task(int(order[position]))


@lru_cache(maxsize=8)
def _shuffled(num_tasks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num_tasks)


def _cycle_of(ratios: Sequence[float]) -> tuple[list[tuple[int, int]], list[int]]:
    """Per draw of one cycle (environment, how often it came before), and how often each comes in all."""
    total = sum(ratios)
    shares = [max(round(CYCLE * ratio / total), 1) for ratio in ratios]
    divisor = gcd(*shares)
    counts = [share // divisor for share in shares]
    # The j-th of c draws of an environment falls at (j + 1/2) / c of the cycle; fractions make ties exact.
    places = [(Fraction(2 * j + 1, 2 * c), env, j) for env, c in enumerate(counts) for j in range(c)]
    return [(env, j) for _, env, j in sorted(places)], counts
