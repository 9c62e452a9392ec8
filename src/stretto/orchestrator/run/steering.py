"""Steers how far generation is ahead, for most effective tokens per second; the key is [orchestrator.steering].

Levels are the rungs of a ladder: 1, 2, 3, 4, 6, 8, 12, 16 and so on, between the bounds. After a change the steps in
which it takes effect are left out; then `interval` steps are measured, and one decision is made:

    effective sample size below min_ess      down to where it should be above, if its logarithm grows with the level
    the level does not earn its gain         one rung down; tried again after `retry` decisions, then twice as many
    the trainer waits                        up to where it would not wait, if rollouts per second grow with those in
                                             flight, and no level that should be below min_ess; decided after
                                             EARLY_STEPS if it waits for most of the time
    no lower rung was measured for a while   one rung down, to see whether it is as good
    else                                     no change

The gain of a level is measured against the highest one below it that is known: d levels more must give d * min_gain.
Where rollouts take very different times ten steps say little, so a level is condemned only if its gain is too small by
more than its standard error, which follows from how unequal the steps were. Time, tokens and waits are arguments:
nothing here waits or asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stretto.config.sections.orchestrator import SteeringSection

EVENT = "steering"
"""The ledger's event of a decision: the fields of Decision."""
MEMORY = 24  # decisions after which what was measured of a level is forgotten
MOST_WEIGHT = 6  # measurements of a level that count; of more the older ones fade
LARGE_WAIT = 1 / 3
EARLY_STEPS = 4


@dataclass(frozen=True)
class Decision:
    """One decision, after a step: the level from now on, and what was measured at the one before."""

    step: int
    level_before: int
    level: int
    effective_tokens_per_s: float
    ess: float
    waited: float
    """Share of the time in which the trainer waited for a batch."""
    reason: str

    def __str__(self) -> str:
        change = f"{self.level_before} -> {self.level}" if self.level != self.level_before else f"stays {self.level}"
        return (
            f"step {self.step}: asynchrony {change}, {self.reason} ({self.effective_tokens_per_s:.0f} effective tokens "
            f"per second, ess {self.ess:.2f}, the trainer waited {self.waited:.0%})"
        )

    def as_dict(self) -> dict[str, Any]:
        """The row of the ledger."""
        return asdict(self)


@dataclass
class Window:
    """What is summed over the steps that are measured."""

    began: float
    ended: float
    steps: float = 0.0
    tokens: float = 0.0
    effective: float = 0.0
    waited_s: float = 0.0
    squares: float = 0.0
    """The seconds of each step, squared."""


@dataclass
class Speed:
    """Sums over the measurements of a level: effective tokens, seconds, steps and squares of their seconds."""

    effective: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    squares: float = 0.0
    num: int = 0
    at: int = 0
    """The decision of the latest measurement."""

    def add(self, window: Window, at: int) -> None:
        """Add a measurement."""
        kept = 1.0 if self.num < MOST_WEIGHT else 1 - 1 / MOST_WEIGHT
        self.effective = kept * self.effective + window.effective
        self.seconds = kept * self.seconds + window.ended - window.began
        self.steps = kept * self.steps + window.steps
        self.squares = kept * self.squares + window.squares
        self.num, self.at = self.num + 1, at

    @property
    def mean(self) -> float:
        """Effective tokens per second."""
        return self.effective / self.seconds

    @property
    def error(self) -> float:
        """Standard error of the mean, as a share of it: that of so few steps, as Student's t has it."""
        mean = self.seconds / self.steps
        variance = max(self.squares / self.steps - mean**2, 0.0)
        return math.sqrt(variance / max(self.steps - 3, 1.0)) / mean


class Steering:
    """Chooses the level; `level` is the current one."""

    def __init__(self, cfg: SteeringSection, level: int) -> None:
        self.cfg, self.rungs = cfg, ladder(cfg.min_level, cfg.max_level)
        self._rung = max(i for i, rung in enumerate(self.rungs) if rung <= max(level, self.rungs[0]))
        self._num_decisions = 0
        self._speeds: dict[int, Speed] = {}  # by level
        self._failures: dict[int, int] = {}  # by level
        self._blocked_until: dict[int, int] = {}  # by level: the decision
        self._left_out = self.level + 1  # steps until a change has taken effect
        self._window: Window | None = None

    @property
    def level(self) -> int:
        return self.rungs[self._rung]

    def add_step(
        self, step: int, now: float, tokens: float, metrics: Mapping[str, float], waited_s: float
    ) -> Decision | None:
        """Add a trained step of so many sampled tokens; a decision if it ends a measurement.

        now: seconds of any clock; waited_s: how long the trainer had no batch before this one.
        """
        if self._left_out > 0 or self._window is None:
            self._left_out -= 1
            self._window = Window(now, now)
            return None
        ess, window = metrics.get(f"ess/{self.cfg.effective}", 1.0), self._window
        window.steps, window.tokens = window.steps + 1, window.tokens + tokens
        window.effective, window.waited_s = window.effective + tokens * ess, window.waited_s + waited_s
        window.squares, window.ended = window.squares + (now - window.ended) ** 2, now
        took = now - window.began
        if took <= 0 or not self._is_long_enough(window, window.waited_s / took):
            return None
        decision = self._decide(step, window, took)
        self._window = Window(now, now)
        if decision.level != decision.level_before:
            self._left_out = max(decision.level, decision.level_before) + 1
        return decision

    def _is_long_enough(self, window: Window, waited: float) -> bool:
        """Is the measurement over? A trainer that mostly waits is helped early, unless that was tried."""
        if window.steps >= self.cfg.interval:
            return True
        is_stuck = self._failures or self._rung + 1 == len(self.rungs)
        return window.steps >= EARLY_STEPS and waited > LARGE_WAIT and not is_stuck

    def _decide(self, step: int, window: Window, took: float) -> Decision:
        before = self.level
        self._num_decisions += 1
        known = self._speeds[before] = self._speed_of(before) or Speed()
        known.add(window, self._num_decisions)
        ess, waited = window.effective / max(window.tokens, 1.0), min(window.waited_s / took, 1.0)
        self._rung, reason = self._next_rung(ess, waited)
        return Decision(step, before, self.level, window.effective / took, ess, waited, reason)

    def _next_rung(self, ess: float, waited: float) -> tuple[int, str]:
        """The rung from now on, and why."""
        cfg, rung, level = self.cfg, self._rung, self.level
        if ess < cfg.min_ess:
            if rung == 0:
                return 0, f"ess is below min_ess = {cfg.min_ess:g} at the lowest level"
            self._fail(level)
            lower_rungs = (each for each in range(rung - 1, 0, -1) if self._is_worth(self.rungs[each], ess))
            return next(lower_rungs, 0), f"ess is below min_ess = {cfg.min_ess:g}"
        own = self._speeds[level]
        lower = next((each for each in reversed(self.rungs[:rung]) if self._speed_of(each) is not None), None)
        if lower is not None and (below := self._speeds[lower]).mean > 0:
            gain, wanted = own.mean / below.mean - 1, cfg.min_gain * (level - lower)
            if gain + (1 + gain) * math.hypot(own.error, below.error) < wanted:
                self._fail(level)
                return rung - 1, f"level {level} gives {gain:+.0%} over level {lower} and must give {wanted:+.0%}"
        if waited > cfg.min_wait and (up := self._rung_without_wait(waited, ess)) > rung:
            return up, "the trainer waits"
        if rung and lower is None:
            return rung - 1, "is a lower level as good?"
        return rung, "no other level is known to be better"

    def _rung_without_wait(self, waited: float, ess: float) -> int:
        """The rung at which the trainer would not wait, below those that have failed lately or would be below min_ess;
        otherwise at least one up.
        """
        wanted = (self.level + 1) / max(1 - waited, 0.05) - 1
        up = self._rung
        while up + 1 < len(self.rungs) and self._blocked_until.get(self.rungs[up + 1], 0) <= self._num_decisions:
            is_enough = up > self._rung and self.rungs[up + 1] > wanted
            if is_enough or not self._is_worth(self.rungs[up + 1], ess):
                break
            up += 1
        return up

    def _is_worth(self, level: int, ess: float) -> bool:
        """Whether min_ess should hold at this level, where `ess` is that of the current one."""
        return bool(ess ** (level / self.level) >= self.cfg.min_ess)

    def _speed_of(self, level: int) -> Speed | None:
        """What was measured of a level; None if that is forgotten."""
        speed = self._speeds.get(level)
        return speed if speed is not None and self._num_decisions - speed.at < MEMORY else None

    def _fail(self, level: int) -> None:
        self._failures[level] = failures = self._failures.get(level, 0) + 1
        self._blocked_until[level] = self._num_decisions + self.cfg.retry * 2 ** (failures - 1)


def ladder(low: int, high: int) -> list[int]:
    """The levels from low to high: 1, 2, 3, 4, 6, 8, 12, 16, ..., and both bounds."""
    rungs, power = {1, 2, 3, high, low}, 4
    while power <= high:
        rungs |= {power, power * 3 // 2}
        power *= 2
    return sorted(rung for rung in rungs if low <= rung <= high)
