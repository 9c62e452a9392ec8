"""Held-out reward: of a version during training, and of any engine as the verb `eval`.

Every environment's held-out tasks are played twice: sampled (group_size rollouts a task) and greedy (one).
The same tasks and seeds are used for every version, so that two evals differ by the weights alone. The
caller holds back new weights while an eval runs, so that its figures belong to one version; what the engines
say they sampled from is recorded beside it. Failed rollouts are left out of the means and counted.

RUN/evals/version_N holds results.json, written last, and one file of samples an environment and way of
playing: a line of JSON a rollout, with prompt, reply and reward.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import comb
from pathlib import Path

import numpy as np

from stretto.base import log, process
from stretto.base.errors import ConfigError, EngineError
from stretto.base.paths import RunDir
from stretto.base.ports import is_free
from stretto.base.watch import Watch
from stretto.chat.render import Renderer
from stretto.config.orchestrator import EvalSection, SamplingSection
from stretto.config.roots import EvalConfig, InferenceConfig
from stretto.envs.base import Environment, RunInfo
from stretto.orchestrator.build import build_chat, build_engines, build_renderer_of, open_env, run_info
from stretto.orchestrator.rollout import Draw, Player
from stretto.orchestrator.scoring import is_counted
from stretto.records.rollout import Branch, Group, RolloutStatus, Task
from stretto.transports.engine.chat import ChatClient

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Score:
    """One environment played one way. Means are over the rollouts that did not fail."""

    env: str
    mode: str  # "sampled" | "greedy"
    mean: float
    k: int  # rollouts a task; `mean` is avg@k
    pass_at_k: dict[
        int, float
    ]  # chance that one of k is a success, for k = 1, 2, 4, ...; only for 0/1 rewards
    pass_all_k: dict[int, float]  # chance that all of k are
    num_tasks: int
    num_failed: int
    num_truncated: int
    completion_tokens: float  # mean
    time_s: float
    version: int = 0  # loaded when it began
    versions: tuple[int, int] | None = (
        None  # oldest and newest that tokens came from, where the engine says so
    )


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
    ) -> None:
        self.section = section
        self._plans = [_plan(env, section) for env in envs]
        self._player = player
        self._max_inflight = max_inflight_rollouts
        self._watch = watch
        self._run_dir = run_dir  # where results and samples go; None: nowhere

    async def evaluate(self, version: int, *, end: int | None = 0) -> list[Score]:
        """Scores of every environment that is due, sampled and (if asked for) greedy.

        Raises: EngineError when nothing succeeded, with the cause.
        """
        scores = []
        for plan in self._plans:
            if not _comes(plan.interval, version, end=end):
                continue
            scores.append(await self._play(plan, version, "sampled", plan.group_size))
            if self.section.greedy:
                scores.append(await self._play(plan, version, "greedy", 1))
        if self._run_dir is not None:
            _write_results(self._run_dir.eval(version) / "results.json", scores)
        return scores

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
        score = _score(env.name, mode, k, groups, time.perf_counter() - started)
        if self._run_dir is not None and self.section.save_samples:
            path = self._run_dir.eval(version) / f"{env.name.replace('/', '_')}-{mode}.jsonl"
            await write_samples(path, groups, self._player.renderer, mode, version)
        score = dataclasses.replace(score, version=version)
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


def is_due(section: EvalSection | None, version: int, *, end: int | None) -> bool:
    """Is `version` one that the run evaluates? The first and the last, and every interval between."""
    if section is None or (version == 0 and section.skip_first_step):
        return False
    intervals = [own.interval or section.interval for own in section.env] or [section.interval]
    return any(_comes(interval, version, end=end) for interval in intervals)


def _comes(interval: int | None, version: int, *, end: int | None) -> bool:
    is_interval = interval is not None and version % interval == 0
    return version == 0 or is_interval or (end is not None and version >= end)


def overall(scores: Sequence[Score], mode: str) -> float | None:
    """Mean over environments of one way of playing; None where it was not played."""
    means = [score.mean for score in scores if score.mode == mode]
    return float(np.mean(means)) if means else None


def eval_envs(
    section: EvalSection,
    train: Sequence[Environment],
    run_dir: RunDir,
    stack: AsyncExitStack,
    run: RunInfo | None = None,
) -> list[Environment]:
    """The environments an eval section names, or those that are trained on; `stack` closes the first."""
    return [open_env(env, run_dir.logs / "eval", stack, run) for env in section.env] or list(train)


def _held_out(env: Environment, num_examples: int | None) -> list:
    source = env.tasks("eval")
    if num_examples is None and source.num_tasks is None:
        raise ConfigError(f"eval.num_examples: environment {env.name!r} has no end of tasks; give a number.")
    count = min(n for n in (num_examples, source.num_tasks) if n is not None)
    return [source.task(index) for index in range(count)]


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is a success: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374, equation 1. Differs: exact integers.
    """
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def pass_all_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased chance that all of k samples are successes: C(c, k) / C(n, k)."""
    return comb(num_solved, k) / comb(num_samples, k)


def _at_k(groups: Sequence[Group], k: int, estimate: Callable[[int, int, int], float]) -> dict[int, float]:
    """Mean over tasks by powers of two up to k; a task with too many failed rollouts is left out of a mean."""
    counts = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts if is_counted(rollout)]
        counts.append((len(rewards), sum(reward == 1.0 for reward in rewards)))
    sizes = [2**i for i in range(k.bit_length()) if 2**i <= k]
    estimates = {size: [estimate(n, c, size) for n, c in counts if n >= size] for size in sizes}
    return {size: float(np.mean(values)) for size, values in estimates.items() if values}


async def write_samples(
    path: Path, groups: Sequence[Group], renderer: Renderer, mode: str, version: int
) -> None:
    """A line a rollout: what was asked, what was said, what it earned. Whole or not at all.

    Rollouts of the training run go on between two groups.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        for group in groups:
            for rollout in group.rollouts:
                line = {
                    "version": version,
                    "env": rollout.task.env,
                    "mode": mode,
                    "task_id": rollout.task.task_id,
                    "member": rollout.member,
                    "reward": rollout.reward,
                    "status": str(rollout.status),
                    "error": rollout.error,
                    "metrics": rollout.metrics,
                    "num_turns": rollout.num_turns,
                    "num_tokens": rollout.num_sampled_tokens,
                    "branches": [_texts(branch, renderer) for branch in rollout.branches],
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            await asyncio.sleep(0)
    part.replace(path)


def _texts(branch: Branch, renderer: Renderer) -> dict[str, str]:
    """The prompt up to the first sampled token, and everything after it."""
    start = int(branch.is_sampled.argmax()) if branch.is_sampled.any() else len(branch.token_ids)
    ids = branch.token_ids
    return {"prompt": renderer.decode(ids[:start]), "reply": renderer.decode(ids[start:])}


def _write_results(path: Path, scores: Sequence[Score]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps([dataclasses.asdict(score) for score in scores], indent=2) + "\n")
    part.replace(path)


def recall(run_dir: RunDir, version: int) -> dict[str, float] | None:
    """Mean rewards of an eval that was done, by way of playing; None where there was none."""
    path = run_dir.eval(version) / "results.json"
    if not path.exists():
        return None
    rows = json.loads(path.read_text())
    modes = {row["mode"] for row in rows}
    return {mode: float(np.mean([row["mean"] for row in rows if row["mode"] == mode])) for mode in modes}


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
    versions = [s.version for r in counted for branch in r.branches for s in branch.versions]
    return Score(
        env=env,
        mode=mode,
        mean=float(np.mean([rollout.reward for rollout in counted])),
        k=k,
        pass_at_k=_at_k(groups, k, pass_at_k) if is_binary and k > 1 else {},
        pass_all_k=_at_k(groups, k, pass_all_k) if is_binary and k > 1 else {},
        num_tasks=len(groups),
        num_failed=num_failed,
        num_truncated=sum(rollout.status is RolloutStatus.TRUNCATED for rollout in counted),
        completion_tokens=float(np.mean([rollout.num_sampled_tokens for rollout in counted])),
        time_s=time_s,
        versions=(min(versions), max(versions)) if versions else None,
    )


# -- the verb --


def main(cfg: EvalConfig) -> int:
    """Evaluate running engines, or one started for `cfg.model`; prints a table, writes eval.json and samples."""
    cfg.run_path.mkdir(parents=True, exist_ok=True)
    log.setup("eval", cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    scores = asyncio.run(evaluate_engine(cfg))
    path = cfg.run_path / "eval.json"
    path.write_text(json.dumps([dataclasses.asdict(score) for score in scores], indent=2) + "\n")
    sys.stdout.write(table(scores) + f"\n\n{path}\n")
    return 0


async def evaluate_engine(cfg: EvalConfig) -> list[Score]:
    """Scores of the engines the config names."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(_engine_url(cfg))
        section = cfg.client if url is None else cfg.client.model_copy(update={"base_url": url})
        async with build_chat(section) if section.api == "chat" else build_engines(section) as engines:
            renderer = None if isinstance(engines, ChatClient) else _renderer(cfg)
            about = run_info(cfg, renderer, cfg.eval.sampling, cfg.tokenizer.name or cfg.model)
            envs = [open_env(env, cfg.run_dir.logs, stack, about) for env in cfg.eval.env]
            await engines.wait_ready(section.ready_timeout_s)
            player = Player(
                engine=engines,
                renderer=renderer or engines,
                sampling=cfg.eval.sampling,
                seq_len=cfg.seq_len,
                seed=cfg.seed,
                run_id=cfg.run_name,
                timeout_s=cfg.rollout_timeout_s,
            )
            evaluator = Evaluator(
                envs, cfg.eval, player, max_inflight_rollouts=cfg.max_inflight_rollouts, run_dir=cfg.run_dir
            )
            return await evaluator.evaluate(0)


def _renderer(cfg: EvalConfig) -> Renderer:
    model = cfg.model or cfg.tokenizer.name
    if model is None:
        raise ConfigError(
            "tokenizer.name: give the tokenizer of the model that runs at client.base_url, or set client.api = "
            '"chat" to evaluate with text alone.'
        )
    return build_renderer_of(model, cfg.tokenizer.name, cfg.renderer)


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
    sizes = sorted({k for score in scores for k in score.pass_at_k if k > 1})
    passes = [f"pass@{k}" for k in sizes]
    rows = [("environment", "mode", "k", "avg@k", *passes, "tasks", "failed", "truncated", "tokens", "time")]
    for score in scores:
        passed = [f"{score.pass_at_k[k]:.3f}" if k in score.pass_at_k else "" for k in sizes]
        counts = (str(score.num_tasks), str(score.num_failed), str(score.num_truncated))
        length, time_s = f"{score.completion_tokens:.1f}", f"{score.time_s:.1f}s"
        rows.append(
            (score.env, score.mode, str(score.k), f"{score.mean:.3f}", *passed, *counts, length, time_s)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
