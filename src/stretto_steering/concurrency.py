"""Adapts the limit on rollouts in flight: additive increase, multiplicative decrease.

    engine load                limit
    ------------------------   ------------------------------------------------
    low (cache below low, no   + increase, if as many rollouts run as the limit allows
    request waits)
    high (cache above high,    x decrease, once; then unchanged for cooldown_s
    many requests wait, or
    one was preempted)
    anything else              unchanged

Of the limit itself time and load are arguments; `RunLimit` asks the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stretto.config.sections.orchestrator import AdaptiveConcurrency, OrchestratorSection
from stretto.orchestrator.groups.buffer import Buffer
from stretto.orchestrator.run.parts import RunParts
from stretto.orchestrator.run.ship import engine_metrics


@dataclass(frozen=True)
class EngineLoad:
    """The load of all engines at one moment."""

    cache_usage: float  # 0 .. 1, mean over engines
    num_waiting: float  # waiting requests, mean over engines
    num_preemptions: float  # since the engines started, sum

    @classmethod
    def of(cls, metrics: Mapping[str, float], num_engines: int) -> EngineLoad | None:
        """The load, from metrics summed over engines; None if a metric is missing."""
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_preemptions_total")
        if not all(name in metrics for name in names) or not num_engines:
            return None
        usage, waiting, preemptions = (metrics[name] for name in names)
        return cls(usage / num_engines, waiting / num_engines, preemptions)


@dataclass
class AdaptiveLimit:
    """The limit on rollouts in flight; it never exceeds `upper_bound`."""

    cfg: AdaptiveConcurrency
    upper_bound: int
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        if self.cfg.max_rollouts is not None:
            self.upper_bound = min(self.upper_bound, self.cfg.max_rollouts)
        self.limit = min(self.cfg.initial_rollouts or self.cfg.min_rollouts, self.upper_bound)
        self._preemptions: float | None = None
        self._quiet_until = float("-inf")

    def update(self, load: EngineLoad, num_running: int, now: float) -> int:
        """Update the limit by the engines' load and return it; `now` is in seconds of any clock."""
        before, self._preemptions = self._preemptions, load.num_preemptions
        # A restarted engine counts from 0 again: a lower count is no preemption.
        is_preempted = before is not None and load.num_preemptions > before
        if now < self._quiet_until:
            return self.limit
        cfg = self.cfg
        if is_preempted or load.cache_usage > cfg.cache_high or load.num_waiting > cfg.waiting_high:
            self.limit = max(int(self.limit * cfg.decrease), min(cfg.min_rollouts, self.upper_bound))
            self._quiet_until = now + cfg.cooldown_s
        elif load.cache_usage < cfg.cache_low and not load.num_waiting and num_running >= self.limit - cfg.increase:
            self.limit = min(self.limit + cfg.increase, self.upper_bound)
        return self.limit


class RunLimit:
    """The limit of a run, as `orchestrator.run.parts.Limit` says."""

    def __init__(self, run: RunParts) -> None:
        self._parts, self._limit = run, build_limit(run.cfg, run.buffer)

    async def follow(self) -> None:
        """Adjust the limit on running groups to the engines' load."""
        run, limit, group_size = self._parts, self._limit, self._parts.cfg.largest_group
        while True:
            run.buffer.limit_running(max(limit.limit // group_size, 1))
            await asyncio.sleep(limit.cfg.interval_s)
            load = EngineLoad.of(await engine_metrics(run.engines), run.engines.num_ready)
            if load is not None:
                limit.update(load, run.buffer.num_running * group_size, time.monotonic())

    def gauges(self) -> dict[str, float]:
        """The limit, as a metric."""
        return {"concurrency/limit": float(self._limit.limit)}


def build_limit(cfg: OrchestratorSection, buffer: Buffer) -> AdaptiveLimit:
    """Build the adaptive limit of a run."""
    assert isinstance(cfg.concurrency, AdaptiveConcurrency), "the caller has looked"
    bounds = replace(buffer.bounds, max_async_level=cfg.most_async_level)
    upper_bound = cfg.max_inflight_rollouts or bounds.num_slots * cfg.largest_group
    return AdaptiveLimit(cfg.concurrency, upper_bound)
