"""Runs the orchestrator for some steps under a virtual clock, against simulated engines and trainer.

Draws, the buffer, the pipeline of groups, filters, packing, shipping, loading of versions and the ledger are the real
code (orchestrator/). Staleness is read from the ledger that it writes, as from a real run's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stretto.base.errors import StrettoError
from stretto.base.paths import RunDir
from stretto.config.root import OrchestratorConfig, SFTConfig
from stretto.config.sections.algorithm import GrpoAlgo
from stretto.config.sections.curriculum import CurriculumSection
from stretto.config.sections.deployment import RunSection
from stretto.config.sections.hooks import HooksSection
from stretto.config.sections.monitors import MonitorsSection
from stretto.envs.base import RunInfo
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.main import UserCode, Wires, build_loop
from stretto.orchestrator.state.resume import starting_point
from stretto.records.row_packing import pack_rows
from stretto.virtual_clock import Cores, run_virtual
from stretto_plan.costs import Costs
from stretto_plan.simulation.ends import (
    OrchestratorThread,
    SimulatedEngine,
    SimulatedStep,
    SimulatedTrainer,
    UnitRenderer,
    build_env,
)
from stretto_plan.workload import Numbers, Workload
from stretto_steering.controller import EVENT as STEERING

STEPS, UNITS = 40, 512
"""Steps that are simulated by default; units (of one token or more) in the longest rollout."""
MOST_TURNS = 8
"""Turns of a simulated rollout on average, at most: more turns are merged into fewer, longer ones."""


@dataclass(frozen=True)
class Times:
    """How long a run's steps take. Seconds are means per step; shares are of a step's time."""

    step_s: float
    train_s: float
    publish_s: float
    trainer_wait_s: float
    load_s: float
    read_s: float
    """How long prefill engines are busy."""
    write_s: float
    """How long engines that decode are busy."""
    engine_idle: float
    trainer_idle: float
    staleness_mean: float
    staleness_p95: float
    rollouts: int
    sampled_tokens: float
    """Per step."""
    trained_tokens: float
    """Per step, prompts included."""
    dropped_groups: int
    rollout_s_mean: float
    rollout_s_p95: float
    late_share: float
    """Share of the rollouts that take longer than rollout_timeout_s; the simulation lets them end."""
    num_steps: int
    spread: float = 0.0
    """Standard error of step_s, as a share of it: another run of so many steps differs by about as much."""

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.step_s


def simulate(costs: Costs, workload: Workload, *, steps: int = STEPS) -> Times:
    """The times of a run with these costs and rollouts; the first steps, while the pipeline fills, do not count.

    Raises: StrettoError as the orchestrator would, such as EngineError if every rollout takes too long.
    """
    return _simulate(costs, workload, steps)[0]


def simulate_steering(costs: Costs, workload: Workload, *, steps: int) -> list[dict[str, Any]]:
    """What the run's own [orchestrator.steering] decides in so many steps: the fields of each `Decision`, in order.

    A simulation knows no effective sample sizes: all are 1. Raises: StrettoError, as `simulate`.
    """
    return _simulate(costs, workload, steps)[1]


def _simulate(costs: Costs, workload: Workload, steps: int) -> tuple[Times, list[dict[str, Any]]]:
    level = costs.setup.rl.orchestrator.max_async_level
    first = min(level + 2, 6)
    scale = max(1.0, costs.setup.rl.seq_len / UNITS) if costs.setup.rl.seq_len > 16_384 else 1.0
    workload = workload.merged(MOST_TURNS)
    loggers = logging.getLogger("stretto")
    before = loggers.level
    loggers.setLevel(logging.CRITICAL)
    try:
        with TemporaryDirectory(prefix="stretto-plan-") as directory:
            cfg = _simulated_config(costs, Path(directory), steps + first, scale)
            return run_virtual(_run(cfg, costs, workload, scale, first))
    finally:
        loggers.setLevel(before)


def _simulated_config(costs: Costs, directory: Path, max_steps: int, scale: float) -> OrchestratorConfig:
    """The orchestrator's config with lengths in units, and without evals, filters, hooks and the like."""
    cfg = costs.setup.rl.orchestrator_config()
    sampling = cfg.train.sampling
    limit = sampling.max_completion_tokens
    units = None if limit is None else max(1, math.ceil(limit / scale))
    per_batch = cfg.token_batch_size
    plain = {"max_completion_tokens": units, "top_p": 1.0, "top_k": None, "min_p": 0.0}
    train = cfg.train.model_copy(update={"sampling": sampling.model_copy(update=plain), "replay": None})
    envs = [
        env.model_copy(
            update={
                "algo": None, "curriculum": None, "num_workers": None,
                "sampling": type(env.sampling)(), "rollout_timeout_s": None,
            }
        )
        for env in cfg.env
    ]  # fmt: skip
    return cfg.model_copy(
        update={
            "output_dir": directory, "run": RunSection(name="plan"), "resume": None, "max_steps": max_steps,
            "budget": None,
            "seq_len": max(2, int(cfg.seq_len / scale)),
            "row_tokens": None if cfg.row_tokens is None else max(2, int(cfg.row_tokens / scale)),
            "token_batch_size": None if per_batch is None else max(1, round(per_batch / scale)),
            "train": train, "env": envs, "eval": None, "filters": [],
            "hooks": HooksSection(), "algo": GrpoAlgo(), "teacher": None, "monitors": MonitorsSection(),
            "stall_timeout_s": 3600.0, "rollout_timeout_s": None, "curriculum": CurriculumSection(),
        }
    )  # fmt: skip


async def _run(
    cfg: OrchestratorConfig, costs: Costs, workload: Workload, scale: float, first: int
) -> tuple[Times, list[dict[str, Any]]]:
    cores = Cores(costs.cores if costs.setup.is_cpu else 1 if costs.setup.is_colocated else math.inf)
    thread = OrchestratorThread(cores if costs.setup.is_cpu else Cores(1))
    engine = SimulatedEngine(costs, workload, cores, thread, scale)
    assert cfg.max_steps is not None
    trainer = SimulatedTrainer(costs, cores, thread, max_steps=cfg.max_steps, ranks=cfg.num_train_workers, scale=scale)
    marks: list[tuple[float, float, float, float]] = []
    async with AsyncExitStack() as stack:
        stack.callback(engine.close)
        wires = Wires(engine, trainer, trainer)  # type: ignore[arg-type]
        envs: Any = [build_env(env.name or env.id, workload, scale) for env in cfg.env]
        code = UserCode(RunInfo(), envs, None, None, None)
        loop = build_loop(cfg, wires, UnitRenderer(), starting_point(cfg), stack, code)  # type: ignore[arg-type]
        watching = asyncio.create_task(_mark(trainer, engine, marks))
        stack.callback(watching.cancel)
        await loop.run()
    limits = [
        env.rollout_timeout_s or costs.setup.rl.orchestrator.rollout_timeout_s
        for env in costs.setup.rl.orchestrator.env
    ]
    limit = min((each for each in limits if each is not None), default=math.inf)
    began = trainer.steps[first - 1].ended_at if len(trainer.steps) > first else math.inf
    durations = sorted(taken for env in envs for at, taken in env.durations if at >= began)
    with LedgerReader(cfg.run_dir) as reader:
        decisions = [event["data"] for event in reader.events(STEERING)]
    return _times(cfg, trainer.steps, marks, first, scale, durations, limit), decisions


async def _mark(
    trainer: SimulatedTrainer, engine: SimulatedEngine, marks: list[tuple[float, float, float, float]]
) -> None:
    """Append the engines' seconds so far (busy, reading, idle, loading) to marks at the end of each step."""
    while True:
        await trainer.ended.wait()
        trainer.ended.clear()
        marks.append((engine.busy_s, engine.reading_s, engine.idle_now_s, engine.loading_s))


def _times(
    cfg: OrchestratorConfig,
    steps: Sequence[SimulatedStep],
    marks: Sequence[tuple[float, float, float, float]],
    first: int,
    scale: float,
    durations: Sequence[float],
    limit_s: float,
) -> Times:
    counted = steps[first:]
    if not counted:
        raise StrettoError("the simulated run ended before its first steps")
    num = len(counted)
    span = counted[-1].ended_at - steps[first - 1].ended_at
    step_s = span / num
    busy, reading, idle, loading = (
        (after - before) / num for before, after in zip(marks[first - 1], marks[first - 1 + num])
    )
    found = read_ledger(cfg.run_dir, first + 1, first + num)
    return Times(
        step_s=step_s,
        train_s=statistics.mean(step.train_s for step in counted),
        publish_s=statistics.mean(step.publish_s for step in counted),
        trainer_wait_s=statistics.mean(step.wait_s for step in counted),
        load_s=loading,
        read_s=reading,
        write_s=busy,
        engine_idle=min(max(idle / step_s, 0.0), 1.0),
        trainer_idle=min(statistics.mean(step.wait_s for step in counted) / step_s, 1.0),
        staleness_mean=found.staleness_mean,
        staleness_p95=found.staleness_p95,
        rollouts=found.rollouts,
        sampled_tokens=found.sampled_tokens * scale,
        trained_tokens=statistics.mean(step.tokens for step in counted),
        dropped_groups=found.dropped_groups,
        rollout_s_mean=statistics.mean(durations) if durations else 0.0,
        rollout_s_p95=durations[int(0.95 * (len(durations) - 1))] if durations else 0.0,
        late_share=sum(duration > limit_s for duration in durations) / max(len(durations), 1),
        num_steps=num,
        spread=_spread([step.ended_at for step in steps[first - 1 :]]),
    )


def _spread(ends: Sequence[float]) -> float:
    """Standard error of the mean time between ends, as a share of it."""
    times = [after - before for before, after in itertools.pairwise(ends)]
    if len(times) < 2 or not (mean := statistics.mean(times)):
        return 0.0
    return statistics.stdev(times) / math.sqrt(len(times)) / mean


# -- figures from the ledger of a run, simulated or real --


@dataclass(frozen=True)
class LedgerFigures:
    """Figures of some steps of a run."""

    staleness_mean: float
    staleness_p95: float
    rollouts: int
    """Per step."""
    sampled_tokens: float
    """Per step."""
    dropped_groups: int


def read_ledger(run_dir: RunDir, first: int, last: int) -> LedgerFigures:
    """Staleness, rollouts and tokens of the steps from first to last.

    Raises: DataError if there is no ledger.
    """
    query = (
        "SELECT step, group_id, min(first_version) AS version, count(*) AS rollouts, sum(num_sampled_tokens) AS tokens "
        "FROM live_rollouts WHERE step BETWEEN ? AND ? GROUP BY step, group_id"
    )
    with LedgerReader(run_dir) as reader:
        rows = reader.rows(query, first, last)
        dropped = reader.drops_by_reason().get("stale", 0)
    stale = sorted(row["step"] - 1 - row["version"] for row in rows if row["version"] is not None)
    num = max(last - first + 1, 1)
    return LedgerFigures(
        staleness_mean=statistics.mean(stale) if stale else 0.0,
        staleness_p95=float(stale[min(int(0.95 * len(stale)), len(stale) - 1)]) if stale else 0.0,
        rollouts=round(sum(row["rollouts"] for row in rows) / num),
        sampled_tokens=sum(row["tokens"] or 0 for row in rows) / num,
        dropped_groups=dropped,
    )


# -- sft: no engines to wait for, so the slowest data-parallel rank sets the time of a step --


@dataclass(frozen=True)
class SftTimes:
    """Means per step, in seconds, tokens and rows."""

    step_s: float
    passes_s: float
    """Forward and backward passes of the slowest rank."""
    update_s: float
    rank_idle: float
    """Share of the passes in which a data-parallel rank waits for the slowest one, on average."""
    tokens: float
    rows: float
    fill: float
    """Share of the rows' seq_len tokens that examples fill."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


def sft_times(costs: Costs, examples: Numbers, *, steps: int = STEPS) -> SftTimes:
    """The times of steps with examples of these lengths."""
    cfg, dp = costs.setup.cfg, costs.setup.degrees.dp
    assert isinstance(cfg, SFTConfig)
    rng, found = random.Random(0), []
    for _ in range(steps):
        drawn = (round(examples.draw(rng)) for _ in range(cfg.batch_size))
        lengths = np.array([min(max(length, 1), cfg.seq_len) for length in drawn], np.int64)
        rows = [lengths[row] for row in pack_rows(lengths, cfg.seq_len)]
        as_costs = [(float(row.sum()), float((row**2).sum() / 2 / row.sum())) for row in rows]
        ranks = [costs.train_s(as_costs[rank::dp]) for rank in range(dp)]
        found.append((max(ranks), 1 - statistics.mean(ranks) / max(ranks), float(lengths.sum()), len(rows)))
    passes, idle, tokens, rows_per_step = (statistics.mean(values) for values in zip(*found))
    return SftTimes(
        step_s=passes + costs.update_s,
        passes_s=passes,
        update_s=costs.update_s,
        rank_idle=idle,
        tokens=tokens,
        rows=rows_per_step,
        fill=tokens / (rows_per_step * cfg.seq_len),
    )
