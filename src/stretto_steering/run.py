"""Steers one run: tells the controller what happened, and does what it decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from stretto.base.status import report
from stretto.config.root import OrchestratorConfig
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.run.parts import RunParts, StepRow
from stretto.records.control import StepDone
from stretto_steering.controller import AGE, EVENT, Steering, within

logger = logging.getLogger(__name__)

PUBLISHING = "time/publish"


class RunSteering:
    """A run with [orchestrator.steering], as `orchestrator.run.parts.Steering` says."""

    def __init__(self, run: RunParts) -> None:
        assert run.cfg.steering is not None, "the caller has looked"
        self._parts, self._start = run, run.progress.step
        level, least = run.buffer.bounds.max_async_level, run.cfg.weight_broadcast.interval
        self._controller = Steering(run.cfg.steering, level, run.versions.interval, least_interval=least)

    def on_loaded(self, version: int) -> None:
        """Every engine has loaded a version; with the first one rollouts begin."""
        if version > self._start:
            self._controller.costs.pause.append(self._parts.engines.paused_s)
        else:
            self._controller.start(asyncio.get_running_loop().time())

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A rank's own metrics of a step."""
        if step > self._start and PUBLISHING in metrics:
            self._controller.costs.publish.append(metrics[PUBLISHING])

    def on_trained(self, done: StepDone, row: StepRow) -> None:
        """A step is trained: choose how far generation may be ahead, and how often engines get new weights."""
        run, now = self._parts, asyncio.get_running_loop().time()
        metrics = done.metrics | {AGE: row.metrics[AGE]} if AGE in row.metrics else done.metrics
        decision = self._controller.add_step(done.step, now, row.num_tokens, metrics, row.waited_s)
        if decision is None:
            return
        run.ledger.event(EVENT, decision.as_dict())
        run.monitors.log(done.step, {"steering/effective_tokens_per_s": decision.effective_tokens_per_s})
        logger.info("%s", decision)
        if decision.is_change:
            report("note", text=str(decision))
            run.versions.interval = decision.update_interval
            run.buffer.set_async_level(decision.level)

    def gauges(self) -> dict[str, float]:
        """What is set, as metrics."""
        level, interval = self._parts.buffer.bounds.max_async_level, self._parts.versions.interval
        return {"steering/level": float(level), "steering/update_interval": float(interval)}


def setting_after(cfg: OrchestratorConfig, step: int) -> tuple[int, int]:
    """The level, and the steps between two versions that engines get, at which a run goes on after a step."""
    assert cfg.steering is not None, "the caller has looked"
    level = cfg.max_async_level
    interval = least = cfg.weight_broadcast.interval
    with LedgerReader(cfg.run_dir) as reader:
        decided = [event["data"] for event in reader.events_up_to(EVENT, step)]
    if decided:
        level, interval = int(decided[-1]["level"]), int(decided[-1].get("update_interval", least))
    return within(cfg.steering, level, interval, least)
