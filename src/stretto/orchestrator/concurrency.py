"""How many rollouts are in flight: an AIMD machine that follows the engines (additive increase, multiplicative
decrease).

    look at the engines        limit
    ------------------------   ------------------------------------------------
    room (cache below low,     + increase, when the limit is what holds rollouts back
    nobody waits)
    crowded (cache above       x decrease, once; then nothing for cooldown_s
    high, many wait, or one
    was preempted)
    anything else              as it is

Pure: time and looks come in, a limit goes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.config.concurrency import AdaptiveConcurrency


@dataclass(frozen=True)
class Look:
    """What all engines together said at one moment."""

    cache_usage: float  # 0 .. 1, mean over engines
    num_waiting: float  # requests that wait, mean over engines
    num_preemptions: float  # since the engines were started, sum

    @classmethod
    def of(cls, metrics: Mapping[str, float], num_engines: int) -> Look | None:
        """From the engines' summed metrics; None where they say nothing of these."""
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_preemptions_total")
        if not all(name in metrics for name in names) or not num_engines:
            return None
        usage, waiting, preemptions = (metrics[name] for name in names)
        return cls(usage / num_engines, waiting / num_engines, preemptions)


@dataclass
class Aimd:
    """The limit on rollouts in flight. `most` is what other bounds allow at any rate."""

    cfg: AdaptiveConcurrency
    most: int
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        if self.cfg.max_rollouts is not None:
            self.most = min(self.most, self.cfg.max_rollouts)
        self.limit = min(self.cfg.initial_rollouts or self.cfg.min_rollouts, self.most)
        self._preemptions: float | None = None
        self._quiet_until = float("-inf")

    def update(self, look: Look, num_running: int, now: float) -> int:
        """The limit after a look; `now` in seconds of any clock."""
        before, self._preemptions = self._preemptions, look.num_preemptions
        # Engines that were started anew count from 0 again: that is no preemption.
        is_preempted = before is not None and look.num_preemptions > before
        if now < self._quiet_until:
            return self.limit
        cfg = self.cfg
        if is_preempted or look.cache_usage > cfg.cache_high or look.num_waiting > cfg.waiting_high:
            self.limit = max(int(self.limit * cfg.decrease), min(cfg.min_rollouts, self.most))
            self._quiet_until = now + cfg.cooldown_s
        elif (
            look.cache_usage < cfg.cache_low
            and not look.num_waiting
            and num_running >= self.limit - cfg.increase
        ):
            self.limit = min(self.limit + cfg.increase, self.most)
        return self.limit
