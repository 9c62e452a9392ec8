"""Held-out reward: of a version during training, and of any engine as the verb `eval`.

Every environment's held-out tasks are played twice: sampled (group_size rollouts a task) and greedy (one).
The same tasks and seeds are used for every version, so that two evals differ by the weights alone. The
caller holds back new weights while an eval runs, so that its figures belong to one version. Failed rollouts
are left out of the means and counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from stretto.base import log, process
from stretto.base.errors import ConfigError, EngineError
from stretto.base.ports import is_free
from stretto.base.watch import Watch
from stretto.config.orchestrator import EvalSection, SamplingSection
from stretto.config.roots import EvalConfig, InferenceConfig
from stretto.envs.base import Environment
from stretto.orchestrator.build import build_engines, build_env, build_renderer_of
from stretto.orchestrator.rollout import Draw, Player
from stretto.orchestrator.scoring import is_counted
from stretto.records.rollout import Group, RolloutStatus

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Score:
    """One environment played one way. Means are over the rollouts that did not fail."""

    env: str
    mode: str  # "sampled" | "greedy"
    mean: float
    pass_at_k: float | None  # share of tasks with a success among k samples; only for 0/1 rewards and k > 1
    k: int
    num_tasks: int
    num_failed: int
    num_truncated: int
    completion_tokens: float  # mean
    time_s: float


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
    ) -> None:
        self.section = section
        self._tasks = {env.name: (env, _held_out(env, section.num_examples)) for env in envs}
        self._player = dataclasses.replace(player, sampling=section.sampling)
        self._max_inflight = max_inflight_rollouts
        self._watch = watch

    async def evaluate(self, version: int) -> list[Score]:
        """Scores of every environment, sampled and (if asked for) greedy.

        Raises: EngineError when nothing succeeded, with the cause.
        """
        scores = []
        for env, tasks in self._tasks.values():
            scores.append(await self._play(env, tasks, version, "sampled", self.section.group_size))
            if self.section.greedy:
                scores.append(await self._play(env, tasks, version, "greedy", 1))
        return scores

    async def _play(self, env: Environment, tasks: Sequence, version: int, mode: str, k: int) -> Score:
        greedy = SamplingSection(
            temperature=0, max_completion_tokens=self.section.sampling.max_completion_tokens
        )
        player = dataclasses.replace(
            self._player,
            sampling=greedy if mode == "greedy" else self.section.sampling,
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
        return _score(env.name, mode, k, groups, time.perf_counter() - started)


def is_due(section: EvalSection | None, version: int, *, end: int | None) -> bool:
    """Is `version` one that the run evaluates? The first and the last, and every interval between."""
    if section is None:
        return False
    if version == 0:
        return not section.skip_first_step
    is_interval = section.interval is not None and version % section.interval == 0
    return is_interval or (end is not None and version >= end)


def overall(scores: Sequence[Score], mode: str) -> float | None:
    """Mean over environments of one way of playing; None where it was not played."""
    means = [score.mean for score in scores if score.mode == mode]
    return float(np.mean(means)) if means else None


def eval_envs(section: EvalSection, train: Sequence[Environment]) -> list[Environment]:
    """The environments an eval section names, or those that are trained on."""
    return [build_env(env) for env in section.env] or list(train)


def _held_out(env: Environment, num_examples: int | None) -> list:
    source = env.tasks("eval")
    if num_examples is None and source.num_tasks is None:
        raise ConfigError(f"eval.num_examples: environment {env.name!r} has no end of tasks; give a number.")
    count = min(n for n in (num_examples, source.num_tasks) if n is not None)
    return [source.task(index) for index in range(count)]


def _score(env: str, mode: str, k: int, groups: Sequence[Group], time_s: float) -> Score:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counted = [rollout for rollout in rollouts if is_counted(rollout)]
    if rollouts and not counted:
        raise EngineError(
            f"eval of {env}: none of {len(rollouts)} rollouts succeeded; the last: {rollouts[-1].error}"
        )
    if num_failed := len(rollouts) - len(counted):
        cause = next(rollout.error for rollout in rollouts if rollout.error)
        logger.warning(
            "eval of %s: %d of %d rollouts failed and are left out; such as: %s",
            env,
            num_failed,
            len(rollouts),
            cause,
        )
    is_binary = all(rollout.reward in (0.0, 1.0) for rollout in counted)
    solved = [any(is_counted(r) and r.reward == 1.0 for r in group.rollouts) for group in groups]
    return Score(
        env=env,
        mode=mode,
        mean=float(np.mean([rollout.reward for rollout in counted])),
        pass_at_k=float(np.mean(solved)) if is_binary and k > 1 else None,
        k=k,
        num_tasks=len(groups),
        num_failed=num_failed,
        num_truncated=sum(rollout.status is RolloutStatus.TRUNCATED for rollout in counted),
        completion_tokens=float(np.mean([rollout.num_sampled_tokens for rollout in counted])),
        time_s=time_s,
    )


# -- the verb --


def main(cfg: EvalConfig) -> int:
    """Evaluate running engines, or one started for `cfg.model`; prints a table and writes eval.json."""
    cfg.run_path.mkdir(parents=True, exist_ok=True)
    log.setup("eval", cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    scores = asyncio.run(evaluate_engine(cfg))
    path = cfg.run_path / "eval.json"
    path.write_text(json.dumps([dataclasses.asdict(score) for score in scores], indent=2) + "\n")
    sys.stdout.write(table(scores) + f"\n\n{path}\n")
    return 0


async def evaluate_engine(cfg: EvalConfig) -> list[Score]:
    """Scores of the engines the config names."""
    model = cfg.model or cfg.tokenizer.name
    if model is None:
        raise ConfigError("tokenizer.name: give the tokenizer of the model that runs at client.base_url.")
    envs = [build_env(env) for env in cfg.eval.env]
    async with _engine_url(cfg) as url:
        section = cfg.client if url is None else cfg.client.model_copy(update={"base_url": url})
        async with build_engines(section) as engines:
            await engines.wait_ready(section.ready_timeout_s)
            player = Player(
                engine=engines,
                renderer=build_renderer_of(model, cfg.tokenizer.name, cfg.renderer),
                sampling=cfg.eval.sampling,
                seq_len=cfg.seq_len,
                seed=cfg.seed,
                run_id=cfg.run_name,
                timeout_s=cfg.rollout_timeout_s,
            )
            evaluator = Evaluator(envs, cfg.eval, player, max_inflight_rollouts=cfg.max_inflight_rollouts)
            return await evaluator.evaluate(0)


@asynccontextmanager
async def _engine_url(cfg: EvalConfig) -> AsyncIterator[str | None]:
    """The address of an engine of our own, for as long as it is needed.

    None where there is no model to start.
    """
    if cfg.model is None:
        yield None
        return
    server = cfg.inference.server
    port = server.port if "port" in server.model_fields_set else _free_port()
    if not is_free(server.host, port):
        # Whoever listens there would be evaluated instead of `model`.
        raise ConfigError(
            f"inference.server.port = {port} is taken by another process on this machine; stop it, give another "
            "port, or leave it out and a free one is found."
        )
    server = server.model_dump() | {"port": port}
    section = cfg.inference.model_dump() | {"model": cfg.model, "server": server}
    whereabouts = {"output_dir": cfg.output_dir, "run": {"name": cfg.run_name}}
    inference = InferenceConfig.model_validate(section | whereabouts)
    path = cfg.run_dir.config("inference")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(inference.model_dump_json(indent=2))
    threads = inference.num_threads or process.num_cores()
    argv = (sys.executable, "-m", "stretto", "inference", "@", str(path))
    engine = process.start(
        "inference", argv, env=process.thread_env(threads), log=cfg.run_dir.log("inference")
    )
    ending = asyncio.create_task(engine.wait())
    working = asyncio.current_task()
    ending.add_done_callback(lambda done: None if done.cancelled() else working.cancel())
    try:
        yield f"http://{inference.server.host}:{port}/v1"
    except asyncio.CancelledError:
        if not ending.done() or ending.cancelled():
            raise
        working.uncancel()
        lines = "\n  ".join(engine.tail())
        raise EngineError(
            f"the engine ended ({process.describe_exit(ending.result())}); its last lines:\n  {lines}"
        ) from None
    finally:
        ending.cancel()
        await process.stop([engine], grace_s=5.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(scores: Sequence[Score]) -> str:
    """Scores as aligned text, one line an environment and way of playing."""
    rows = [("environment", "mode", "reward", "pass@k", "tasks", "failed", "truncated", "tokens", "time")]
    for score in scores:
        passed = "" if score.pass_at_k is None else f"{score.pass_at_k:.3f} (k={score.k})"
        counts = (str(score.num_tasks), str(score.num_failed), str(score.num_truncated))
        length, time_s = f"{score.completion_tokens:.1f}", f"{score.time_s:.1f}s"
        rows.append((score.env, score.mode, f"{score.mean:.3f}", passed, *counts, length, time_s))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
