"""Evaluates a version: plays every environment's held-out tasks, sampled and greedy.

Sampled means group_size rollouts per task, greedy means one. Every version gets the same tasks and seeds, so that two
evals differ only by the weights. The caller loads no weights during an eval; the versions that engines report are
recorded as well. Means are over rollouts that did not fail; failed ones are counted.

RUN/evals/version_N holds results.json, written last, and one file of samples per environment and mode: one line of
JSON per rollout, with prompt, reply and reward (eval/results.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.status import report
from stretto.base.watch import Watch
from stretto.chat.render import Renderer
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.config.sections.orchestrator import EvalSection, SamplingSection, is_at_interval
from stretto.envs.base import Environment, RunInfo, tasks_of
from stretto.envs.models import NO_MODELS, ChatModel
from stretto.orchestrator.build import eval_run_info, model_names, open_env, system_prompts
from stretto.orchestrator.eval.results import (
    Row,
    build_eval_score,
    example_rows,
    log_rows,
    sample_lines,
    write_results,
    write_samples,
)
from stretto.orchestrator.eval_scores import EvalScore
from stretto.orchestrator.groups.hooks import RolloutFunction
from stretto.orchestrator.rollout.play import Draw, GenerationClient
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import Group, Task

logger = logging.getLogger(__name__)

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
"""What a greedy rollout has in the place of an eval's sampling: what ends a reply or bans a word stays."""


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
        user_function: RolloutFunction | None = None,
    ) -> None:
        """user_function: the user's eval function; if given, it plays instead of the environments."""
        self.section, self._user_function = section, user_function
        self._plans = [_eval_plan(env, section) for env in envs]
        self._player = player
        self._max_inflight = max_inflight_rollouts
        self._watch = watch
        self._run_dir = run_dir  # for results and samples; None if neither is written
        self.examples: list[Row] = []
        """A few conversations of the latest eval of environments, for trackers."""
        self.played: dict[str, Sequence[Group] | Mapping[str, Any]] = {}
        """Groups of the latest eval by environment (greedy ones: `NAME/greedy`), or the user's function's answer."""

    async def evaluate(
        self, version: int, *, end: int | None = 0, scores: list[EvalScore] | None = None
    ) -> list[EvalScore]:
        """Scores of every environment that is due, sampled and (if configured) greedy.

        scores: a list that gets each score as soon as it is known, so that the caller has those before an error.

        Raises: StrettoError if no rollout of an environment succeeded; its class says who must act.
        """
        self.examples, self.played = [], {}
        scores = [] if scores is None else scores
        if self._user_function is not None:
            tasks = [task for plan in self._plans for task in plan.tasks]
            is_written = self._run_dir is not None and self.section.save_samples
            path_of = partial(self._samples_path, version, mode="sampled") if is_written else None
            found, played = await self._user_function.evaluate(version, tasks, self.section, path_of)
            scores += found
            self.played.update(played)
        else:
            for plan in self._plans:
                if not is_at_interval(plan.interval, version, end=end):
                    continue
                scores.append(await self._play_env(plan, version, "sampled", plan.group_size))
                if self.section.greedy:
                    scores.append(await self._play_env(plan, version, "greedy", 1))
        if self._run_dir is not None:
            write_results(self._run_dir.eval_results(version), scores)
        return scores

    @property
    def user_metrics(self) -> dict[str, float]:
        """The other metrics of the user's eval function in the latest eval."""
        return {} if self._user_function is None else self._user_function.metrics

    def _samples_path(self, version: int, name: str, mode: str) -> Path:
        assert self._run_dir is not None
        return self._run_dir.eval(version) / f"{name.replace('/', '_')}-{mode}.jsonl"

    async def _play_env(self, plan: EvalPlan, version: int, mode: str, k: int) -> EvalScore:
        env, tasks = plan.env, plan.tasks
        greedy = plan.sampling.model_copy(update=GREEDY)
        player = dataclasses.replace(
            self._player,
            sampling=greedy if mode == "greedy" else plan.sampling,
            timeout_s=plan.timeout_s or self._player.timeout_s,
            max_retries=self._player.max_retries if plan.max_retries is None else plan.max_retries,
            run_id=f"{self._player.run_id}-v{version}",
            **plan.names,
        )
        may_play, num_played = asyncio.Semaphore(max(self._max_inflight // k, 1)), 0

        async def play(index: int) -> Group:
            async with may_play:
                draw = Draw(index, tasks[index], k, version, name=f"eval-{env.name}-{mode}-")
                group = await player.play(env, draw)
            nonlocal num_played
            num_played += 1
            report("progress", text=f"eval of {env.name}, {mode}", done=num_played, total=len(tasks))
            if self._watch is not None:
                self._watch.progress(f"eval task {index} of {env.name} played")
            return group

        started = time.perf_counter()
        groups = await asyncio.gather(*map(play, range(len(tasks))))
        time_s = time.perf_counter() - started
        self.played[env.name if mode == "sampled" else f"{env.name}/{mode}"] = groups
        if self._run_dir is not None and self.section.save_samples:
            path = self._samples_path(version, env.name, mode)
            await write_samples(path, sample_lines(groups, self._player.renderer, mode, version))
        rows = example_rows(groups, self._player.renderer, mode, version=version, count=self.section.log_samples)
        log_rows(rows)
        self.examples += rows
        score = dataclasses.replace(build_eval_score(env.name, mode, k, groups, time_s), version=version)
        if score.versions not in (None, (version, version)):
            low, high = score.versions
            logger.warning("eval of %s: version %d, but tokens came from %d to %d", env.name, version, low, high)
        return score


def standalone_evaluator(
    cfg: EvalConfig,
    engine: GenerationClient,
    renderer: Renderer,
    envs: Sequence[Environment],
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> Evaluator:
    """Build the evaluator of the verbs `eval` and `evals`, which do not train."""
    player = Player(
        engine=engine,
        renderer=renderer,
        sampling=cfg.eval.sampling,
        seq_len=cfg.seq_len,
        seed=cfg.seed,
        run_id=cfg.run_name,
        timeout_s=cfg.rollout_timeout_s,
        models=models,
    )
    return Evaluator(envs, cfg.eval, player, max_inflight_rollouts=cfg.max_inflight_rollouts, run_dir=cfg.run_dir)


@dataclasses.dataclass(frozen=True)
class EvalPlan:
    """How one environment is evaluated."""

    env: Environment
    tasks: list[Task]
    group_size: int  # of sampled rollouts; greedy ones are played once
    interval: int | None  # steps between evals; None: only before and after training
    sampling: SamplingSection
    timeout_s: float | None  # None, also of max_retries: as the player's
    max_retries: int | None
    names: Mapping[str, Any]
    """The system prompt and the models of the eval's own section: training may have an environment of this name."""


def _eval_plan(env: Environment, section: EvalSection) -> EvalPlan:
    override = next((each for each in section.env if (each.name or each.id) == env.name), None)

    def setting(key: str) -> Any:
        value = getattr(override, key, None)
        return getattr(section, key) if value is None else value

    sections = () if override is None else (override,)
    return EvalPlan(
        env,
        _held_out_tasks(env, setting("num_examples")),
        setting("group_size"),
        setting("interval"),
        section.sampling if override is None else override.sampling.over(section.sampling),
        None if override is None else override.rollout_timeout_s,
        setting("max_rollout_retries"),
        {"system_prompts": system_prompts(*sections), "model_names": model_names(*sections)},
    )


def eval_envs(
    cfg: OrchestratorConfig, train: Sequence[Environment], stack: AsyncExitStack, run: RunInfo
) -> list[Environment]:
    """The environments that the evals of a run name, else those of training; `stack` closes them."""
    section = cfg.eval_as_trained()
    assert cfg.eval is not None and section is not None, "a run without evals has no environments for them"
    info = eval_run_info(run, section)
    return [open_env(env, cfg.run_dir.logs / "eval", stack, info) for env in cfg.eval.env] or list(train)


def _held_out_tasks(env: Environment, num_examples: int | None) -> list[Task]:
    source = tasks_of(env, "eval")
    if num_examples is None and source.num_tasks is None:
        raise ConfigError(f"eval.num_examples: environment {env.name!r} has infinitely many tasks; give a number.")
    count = min(n for n in (num_examples, source.num_tasks) if n is not None)
    return [source.task(index) for index in range(count)]
