"""Held-out reward of a version: every environment's held-out tasks, played sampled and greedy.

Sampled is group_size rollouts a task, greedy is one. The same tasks and seeds are used for every version, so that
two evals differ by the weights alone. The caller holds back new weights while an eval runs, so that its figures
belong to one version; what the engines say they sampled from is recorded beside it. Failed rollouts are left out
of the means and counted.

RUN/evals/version_N holds results.json, written last, and one file of samples an environment and way of
playing: a line of JSON a rollout, with prompt, reply and reward (scores.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from stretto.base.errors import ConfigError, EnvError, StrettoError, boundary
from stretto.base.paths import RunDir
from stretto.base.watch import Watch
from stretto.config.orchestrator import EvalSection, SamplingSection, comes
from stretto.envs.base import Environment, RunInfo, tasks_of
from stretto.orchestrator.buffer import Slot
from stretto.orchestrator.build import open_env, run_of_evals
from stretto.orchestrator.own_rollouts import DataSource, OwnRollouts
from stretto.orchestrator.rollout import Draw, Player
from stretto.orchestrator.scores import Score, score_of, write_own_samples, write_results, write_samples
from stretto.records.rollout import Group, Task

logger = logging.getLogger(__name__)


class Evaluator:
    """Plays the held-out tasks of some environments against one engine."""

    def __init__(
        self,
        envs: Sequence[Environment],
        section: EvalSection,
        player: Player,
        *,
        max_inflight_rollouts: int = 256,
        watch: Watch | None = None,
        run_dir: RunDir | None = None,
        own: OwnRollouts | None = None,
    ) -> None:
        """own: the user's eval function, in the place of the environments' rollouts."""
        self.section, self._own = section, own
        self._plans = [_plan(env, section) for env in envs]
        self._player = player
        self._max_inflight = max_inflight_rollouts
        self._watch = watch
        self._run_dir = run_dir  # where results and samples go; None: nowhere

    async def evaluate(self, version: int, *, end: int | None = 0) -> list[Score]:
        """Scores of every environment that is due, sampled and (if asked for) greedy.

        Raises: StrettoError when nothing succeeded in an environment: the error that says who must act.
        """
        scores = [] if self._own is None else await self._played_by_hook(self._own, version)
        for plan in self._plans if self._own is None else ():
            if not comes(plan.interval, version, end=end):
                continue
            scores.append(await self._play(plan, version, "sampled", plan.group_size))
            if self.section.greedy:
                scores.append(await self._play(plan, version, "greedy", 1))
        if self._run_dir is not None:
            write_results(self._run_dir.eval_results(version), scores)
        return scores

    @property
    def own_metrics(self) -> dict[str, float]:
        """What the user's eval function has measured beside rewards, in the latest eval."""
        return {} if self._own is None else self._own.metrics

    async def _played_by_hook(self, own: OwnRollouts, version: int) -> list[Score]:
        """Scores by the user's eval function, which takes the held-out tasks one after the other."""
        started, tasks = time.perf_counter(), [task for plan in self._plans for task in plan.tasks]
        numbers = itertools.count()

        def draw() -> Slot:
            number = next(numbers)
            return Slot(number, tasks[number % len(tasks)], version)

        source = DataSource(draw, self.section.group_size, asyncio.get_running_loop(), len(tasks))
        try:
            data = await own.evaluate(version, source)
            time_s = time.perf_counter() - started
            with boundary(EnvError, f"{own.hook.where}: its samples"):
                task_ids = {number: slot.task.task_id for number, slot in source.slots.items()}
                for name, entry in data.items() if self._run_dir is not None else ():
                    path = self._samples_path(version, name, "sampled")
                    if self.section.save_samples and entry.get("samples"):
                        await write_own_samples(path, name, entry, self._player.renderer, version, task_ids)
                return [own.score(name, entry, version, time_s) for name, entry in data.items()]
        except StrettoError as error:  # though an engine may have failed it: the eval is lost, not the run
            raise EnvError(str(error)) from error

    def _samples_path(self, version: int, name: str, mode: str) -> Path:
        assert self._run_dir is not None
        return self._run_dir.eval(version) / f"{name.replace('/', '_')}-{mode}.jsonl"

    async def _play(self, plan: Plan, version: int, mode: str, k: int) -> Score:
        env, tasks = plan.env, plan.tasks
        greedy = SamplingSection(temperature=0, max_completion_tokens=plan.sampling.max_completion_tokens)
        player = dataclasses.replace(
            self._player,
            sampling=greedy if mode == "greedy" else plan.sampling,
            run_id=f"{self._player.run_id}-v{version}",
        )
        slots = asyncio.Semaphore(max(self._max_inflight // k, 1))

        async def play(index: int) -> Group:
            async with slots:
                draw = Draw(index, tasks[index], k, version, name=f"eval-{env.name}-{mode}-")
                group = await player.play(env, draw)
            if self._watch is not None:
                self._watch.progress(f"eval task {index} of {env.name} played")
            return group

        started = time.perf_counter()
        groups = await asyncio.gather(*map(play, range(len(tasks))))
        time_s = time.perf_counter() - started
        if self._run_dir is not None and self.section.save_samples:
            path = self._samples_path(version, env.name, mode)
            await write_samples(path, groups, self._player.renderer, mode, version)
        score = dataclasses.replace(score_of(env.name, mode, k, groups, time_s), version=version)
        if score.versions not in (None, (version, version)):
            low, high = score.versions
            logger.warning(
                "eval of %s: version %d, but tokens came from %d to %d", env.name, version, low, high
            )
        return score


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one environment is evaluated."""

    env: Environment
    tasks: list[Task]
    group_size: int
    interval: int | None
    sampling: SamplingSection


def _plan(env: Environment, section: EvalSection) -> Plan:
    own = next((each for each in section.env if (each.name or each.id) == env.name), None)
    if own is None:
        tasks = _held_out(env, section.num_examples)
        return Plan(env, tasks, section.group_size, section.interval, section.sampling)
    return Plan(
        env,
        _held_out(env, own.num_examples or section.num_examples),
        own.group_size or section.group_size,
        own.interval or section.interval,
        own.sampling.over(section.sampling),
    )


def eval_envs(
    section: EvalSection,
    train: Sequence[Environment],
    run_dir: RunDir,
    stack: AsyncExitStack,
    run: RunInfo | None = None,
) -> list[Environment]:
    """The environments an eval section names, or those that are trained on; `stack` closes the first."""
    about = None if run is None else run_of_evals(run, section)
    return [open_env(env, run_dir.logs / "eval", stack, about) for env in section.env] or list(train)


def _held_out(env: Environment, num_examples: int | None) -> list:
    source = tasks_of(env, "eval")
    if num_examples is None and source.num_tasks is None:
        raise ConfigError(f"eval.num_examples: environment {env.name!r} has no end of tasks; give a number.")
    count = min(n for n in (num_examples, source.num_tasks) if n is not None)
    return [source.task(index) for index in range(count)]
