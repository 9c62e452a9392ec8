"""Steers how far generation is ahead, and how often engines get new weights, for most effective tokens per second.

The key is [orchestrator.steering]. Levels are the rungs of a ladder: 1, 2, 3, 4, 6, 8, 12, 16 and so on, between
the bounds. If engines get a version after k more steps than weight_broadcast.interval has, the level is k above the
rung, up to max_level, so that generation overlaps with training as much as before. After a change the steps in which it
takes effect are left out; then `interval` steps are measured, and one decision is made:

    effective sample size below min_ess      down to where it should be above, if its logarithm grows with the level
    the interval does not earn its gain      a lower one; tried again after `retry` decisions, then twice as many
    the level does not earn its gain         one rung down; tried again in the same way
    updates cost more than fresh tokens      to the interval at which effective tokens per second are most, if the
                                             trainer does not wait, or for updates more than for anything else
    the trainer waits                        up to where it would not wait, if rollouts per second grow with those in
                                             flight, and no level that should be below min_ess; decided after
                                             EARLY_STEPS if it waits for most of the time
    updates cost more than fresh tokens      the same, whatever the trainer waits for
    updates cost less than fresh tokens      to the interval at which effective tokens per second are most
    no lower rung was measured for a while   one rung down, to see whether it is as good
    else                                     no change

What an update costs is measured (`UpdateCosts`): seconds in which the trainer publishes, and in which engines stand
still. The slower side has them 1/k times per step. What it is worth: tokens are (k - 1) / 2 versions older on average,
and the logarithm of the effective sample size grows with their age.

The gain of a level is measured against the highest one below it that is known: d levels more must give d * min_gain.
Where rollouts take very different times ten steps say little, so a level is condemned only if its gain is too small by
more than its standard error, which follows from how unequal the steps were. Time, tokens and waits are arguments:
nothing here waits or asks.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stretto.config.sections.orchestrator import SteeringSection

EVENT = "steering"
"""The ledger's event of a decision: the fields of Decision."""
MEMORY = 24  # decisions after which what was measured of a level is forgotten
MOST_WEIGHT = 6  # measurements of a level that count; of more the older ones fade
LARGE_WAIT = 1 / 3
EARLY_STEPS = 4
NUM_UPDATES = 9  # the latest updates whose median cost counts
LEAST_GAIN = -0.999_999  # of an interval whose tokens would be worth nothing
AGE = "off_policy/mean"


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
    update_interval_before: int = 1
    update_interval: int = 1
    """Steps between two versions that engines get, from now on."""
    publish_s: float = 0.0
    """What an update costs the trainer."""
    pause_s: float = 0.0
    """What it costs engines."""

    @property
    def is_change(self) -> bool:
        return (self.level, self.update_interval) != (self.level_before, self.update_interval_before)

    def __str__(self) -> str:
        change = f"{self.level_before} -> {self.level}" if self.level != self.level_before else f"stays {self.level}"
        updates = ""
        if self.update_interval != self.update_interval_before:
            updates = f", updates every {self.update_interval_before} -> {self.update_interval} steps"
        elif self.update_interval > 1:
            updates = f", updates every {self.update_interval} steps"
        return (
            f"step {self.step}: asynchrony {change}{updates}, {self.reason} ({self.effective_tokens_per_s:.0f} "
            f"effective tokens per second, ess {self.ess:.2f}, the trainer waited {self.waited:.0%})"
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
    aged: float = 0.0
    """Tokens times their mean age in versions."""
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


@dataclass
class UpdateCosts:
    """What updates have cost: seconds of the latest ones."""

    publish: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_UPDATES))
    pause: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_UPDATES))

    @property
    def publish_s(self) -> float:
        """Seconds for which the trainer publishes a version."""
        return statistics.median(self.publish) if self.publish else 0.0

    @property
    def pause_s(self) -> float:
        """Seconds for which engines stand still to load it."""
        return statistics.median(self.pause) if self.pause else 0.0


Setting = tuple[int, int]
"""A rung's level, and the steps between two versions that engines get."""


class Steering:
    """Chooses the level and the steps between two versions; `level` and `update_interval` are the current ones."""

    def __init__(self, cfg: SteeringSection, level: int, interval: int = 1, *, least_interval: int = 1) -> None:
        """least_interval: weight_broadcast.interval."""
        self.cfg, self.rungs = cfg, ladder(cfg.min_level, cfg.max_level)
        self.update_interval, self._least_interval = interval, least_interval
        self._most_interval = max(cfg.max_update_interval or least_interval, least_interval)
        rung = level - (interval - least_interval)
        is_highest = level >= cfg.max_level
        reached = [i for i, each in enumerate(self.rungs) if each <= max(rung, self.rungs[0])]
        self._rung = self._top(interval) if is_highest else max(reached)
        self.costs = UpdateCosts()
        self._num_decisions = 0
        self._speeds: dict[Setting, Speed] = {}
        self._failures: dict[Setting, int] = {}
        self._blocked_until: dict[Setting, int] = {}  # the decision
        self._left_out = self.level + 1  # steps until a change has taken effect
        self._window: Window | None = None

    @property
    def level(self) -> int:
        return self._level_at(self._rung, self.update_interval)

    def _level_at(self, rung: int, interval: int) -> int:
        return min(self.rungs[rung] + interval - self._least_interval, self.cfg.max_level)

    def _top(self, interval: int) -> int:
        """The rung that reaches max_level, where engines get a version after so many steps."""
        wanted = self.cfg.max_level - (interval - self._least_interval)
        return next(i for i, each in enumerate(self.rungs) if each >= wanted)

    def add_step(
        self, step: int, now: float, tokens: float, metrics: Mapping[str, float], waited_s: float
    ) -> Decision | None:
        """Add a trained step of so many sampled tokens; a decision if it ends a measurement.

        now: seconds of any clock; waited_s: how long the trainer had no batch before this one. metrics: with the
        effective sample size and the mean age of tokens.
        """
        if self._left_out > 0 or self._window is None:
            self._left_out -= 1
            self._window = Window(now, now)
            return None
        ess, window = metrics.get(f"ess/{self.cfg.effective}", 1.0), self._window
        window.steps, window.tokens = window.steps + 1, window.tokens + tokens
        window.effective, window.waited_s = window.effective + tokens * ess, window.waited_s + waited_s
        window.aged += tokens * metrics.get(AGE, float(self.level))
        window.squares, window.ended = window.squares + (now - window.ended) ** 2, now
        took = now - window.began
        if took <= 0 or not self._is_long_enough(window, window.waited_s / took):
            return None
        decision = self._decide(step, window, took)
        self._window = Window(now, now)
        if decision.is_change:
            self._left_out = max(decision.level, decision.level_before) + 1
        return decision

    def _is_long_enough(self, window: Window, waited: float) -> bool:
        """Is the measurement over? A trainer that mostly waits is helped early, unless that was tried."""
        if window.steps % self.update_interval:
            return False
        if window.steps >= self.cfg.interval:
            return True
        is_stuck = self._failures or self._rung == self._top(self.update_interval)
        return window.steps >= EARLY_STEPS and waited > LARGE_WAIT and not is_stuck

    def _decide(self, step: int, window: Window, took: float) -> Decision:
        before, interval_before = self.level, self.update_interval
        self._num_decisions += 1
        setting = self._setting(self._rung)
        known = self._speeds[setting] = self._speed_of(setting) or Speed()
        known.add(window, self._num_decisions)
        ess, waited = window.effective / max(window.tokens, 1.0), min(window.waited_s / took, 1.0)
        rung, self.update_interval, reason = self._next(window, ess, waited)
        self._rung = min(rung, self._top(self.update_interval))
        return Decision(
            step, before, self.level, window.effective / took, ess, waited, reason, interval_before,
            self.update_interval, self.costs.publish_s, self.costs.pause_s,
        )  # fmt: skip

    def _next(self, window: Window, ess: float, waited: float) -> tuple[int, int, str]:
        """Rung and interval from now on, and why."""
        cfg, rung, interval = self.cfg, self._rung, self.update_interval
        if ess < cfg.min_ess:
            least = self._least_interval
            if rung == 0 and interval == least:
                return 0, interval, f"ess is below min_ess = {cfg.min_ess:g} at the lowest level"
            self._fail(self._setting(rung))
            highest = rung if interval > least else rung - 1
            lower_rungs = (each for each in range(highest, 0, -1) if self._is_worth(self._level_at(each, least), ess))
            return next(lower_rungs, 0), least, f"ess is below min_ess = {cfg.min_ess:g}"
        if (lower := self._known_below(rung, interval)) is not None:
            return lower
        updates_wait = self.costs.pause_s / interval >= waited * (window.ended - window.began) / window.steps / 2
        is_hidden = waited <= cfg.min_wait or updates_wait
        if is_hidden and (rarer := self._best_interval(window, ess, waited)) > interval:
            return rung, rarer, self._why_rarer(window)
        if waited > cfg.min_wait and (up := self._rung_without_wait(waited, ess)) > rung:
            return up, interval, "the trainer waits"
        best = self._best_interval(window, ess, waited)
        if best > interval:
            return rung, best, self._why_rarer(window)
        if best < interval:
            return rung, best, "updates cost less than fresh tokens are worth"
        if rung and not any(self._speed_of((each, interval)) for each in self.rungs[:rung]):
            return rung - 1, interval, "is a lower level as good?"
        return rung, interval, "no other level is known to be better"

    def _known_below(self, rung: int, interval: int) -> tuple[int, int, str] | None:
        """What is known to be better: fewer steps between updates, or a rung less; None if nothing is."""
        rarer, level = range(interval - 1, self._least_interval - 1, -1), self.rungs[rung]
        lower = next((each for each in rarer if self._speed_of((level, each)) is not None), None)
        if lower is not None and (text := self._shortfall((level, lower), interval - lower)):
            self._fail(self._setting(rung))
            return (
                rung,
                lower,
                f"updates every {interval} steps give {text[0]} over every {lower} and must give {text[1]}",
            )
        below = next((each for each in reversed(self.rungs[:rung]) if self._speed_of((each, interval))), None)
        if below is not None and (text := self._shortfall((below, interval), level - below)):
            self._fail(self._setting(rung))
            return rung - 1, interval, f"level {level} gives {text[0]} over level {below} and must give {text[1]}"
        return None

    def _shortfall(self, below: Setting, steps: int) -> tuple[str, str] | None:
        """What this setting gives over another, and what it must give; None if that is not too little for sure.

        steps: of the level, or between updates, that it has more.
        """
        own, other = self._speeds[self._setting(self._rung)], self._speeds[below]
        if other.mean <= 0:
            return None
        gain, wanted = own.mean / other.mean - 1, self.cfg.min_gain * steps
        if gain + (1 + gain) * math.hypot(own.error, other.error) >= wanted:
            return None
        return f"{gain:+.0%}", f"{wanted:+.0%}"

    def _why_rarer(self, window: Window) -> str:
        between_s = (window.ended - window.began) / window.steps * self.update_interval
        publish, pause = self.costs.publish_s / between_s, self.costs.pause_s / between_s
        return f"updates cost {publish:.0%} of the trainer's time and {pause:.0%} of engines'"

    # -- how often engines get new weights --

    def _best_interval(self, window: Window, ess: float, waited: float) -> int:
        """The steps between two versions that should give most effective tokens per second, each step worth min_gain.

        A lower one must lose less than half as much, so that it stays where both are about as good.
        """
        now, step_gain = self.update_interval, math.log1p(self.cfg.min_gain)
        best, most = now, 0.0
        for interval in range(self._least_interval, self._most_interval + 1):
            if interval > now and not self._may_be(interval, window, ess):
                break
            gain, steps = self._gain(interval, window, ess, waited), interval - now
            worth = math.log1p(max(gain, LEAST_GAIN)) - step_gain * (steps if steps > 0 else steps / 2)
            if worth > most:
                best, most = interval, worth
        return best

    def _may_be(self, interval: int, window: Window, ess: float) -> bool:
        """Whether rarer updates are allowed: by min_ess, and what has failed lately."""
        rung = min(self._rung, self._top(interval))
        is_blocked = self._blocked_until.get((self.rungs[rung], interval), 0) > self._num_decisions
        return not is_blocked and self._ess_at(interval, window, ess) >= self.cfg.min_ess

    def _gain(self, interval: int, window: Window, ess: float, waited: float) -> float:
        """Effective tokens per second with another interval, as a share of what there are now, less 1.

        The trainer is the slower side if it does not wait; its publishing is hidden as long as it waits.
        """
        step_s = (window.ended - window.began) / window.steps
        fewer = 1 / self.update_interval - 1 / interval
        publishing = self.costs.publish_s / self.update_interval
        training_s = step_s * (1 - waited) + min(step_s * waited, publishing) - self.costs.publish_s * fewer
        playing_s = step_s - self.costs.pause_s * fewer
        if waited <= self.cfg.min_wait and fewer > 0:
            playing_s = 0.0
        faster = step_s / max(training_s, playing_s, 0.05 * step_s)
        return faster * self._ess_at(interval, window, ess) / ess - 1

    def _ess_at(self, interval: int, window: Window, ess: float) -> float:
        """The effective sample size with another interval: its logarithm grows with the mean age."""
        age = window.aged / max(window.tokens, 1.0)
        older = (interval - self.update_interval) / 2
        return float(min(ess, 1.0) ** max(1 + older / age, 0.0)) if age > 0 else ess

    # -- how far ahead --

    def _rung_without_wait(self, waited: float, ess: float) -> int:
        """The rung at which the trainer would not wait, below those that have failed lately or would be below min_ess;
        otherwise at least one up.
        """
        interval = self.update_interval
        wanted = (self.level + 1) / max(1 - waited, 0.05) - 1
        up = self._rung
        while up < self._top(interval):
            level = self._level_at(up + 1, interval)
            is_blocked = self._blocked_until.get((self.rungs[up + 1], interval), 0) > self._num_decisions
            is_enough = up > self._rung and level > wanted
            if is_blocked or is_enough or not self._is_worth(level, ess):
                break
            up += 1
        return up

    def _is_worth(self, level: int, ess: float) -> bool:
        """Whether min_ess should hold at this level, where `ess` is that of the current one."""
        return bool(ess ** (level / self.level) >= self.cfg.min_ess)

    def _setting(self, rung: int) -> Setting:
        return self.rungs[rung], self.update_interval

    def _speed_of(self, setting: Setting) -> Speed | None:
        """What was measured of a setting; None if that is forgotten."""
        speed = self._speeds.get(setting)
        return speed if speed is not None and self._num_decisions - speed.at < MEMORY else None

    def _fail(self, setting: Setting) -> None:
        self._failures[setting] = failures = self._failures.get(setting, 0) + 1
        self._blocked_until[setting] = self._num_decisions + self.cfg.retry * 2 ** (failures - 1)


def ladder(low: int, high: int) -> list[int]:
    """The levels from low to high: 1, 2, 3, 4, 6, 8, 12, 16, ..., and both bounds."""
    rungs, power = {1, 2, 3, high, low}, 4
    while power <= high:
        rungs |= {power, power * 3 // 2}
        power *= 2
    return sorted(rung for rung in rungs if low <= rung <= high)
