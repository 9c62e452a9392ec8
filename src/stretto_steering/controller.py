"""Steers how far generation is ahead, and how often engines get new weights, for most effective tokens per second.

The key is [orchestrator.steering]. Levels are the rungs of a ladder: 1, 2, 3, 4, 6, 8, 12, 16 and so on, between the
bounds, and the one at which a run starts. If engines get a version after k more steps than weight_broadcast.interval
has, the level is k above the rung, up to max_level, so that generation overlaps with training as much as before.
After a change the steps in which it takes effect are left out; then `interval` steps are measured, a round at least,
and one decision is made, earlier if it is plain:

    effective sample size below min_ess      down to where it should be above, if its logarithm grows with the level
    the interval does not earn its gain      a lower one; tried again after `retry` decisions, then twice as many
    the level does not earn its gain         one rung down; tried again in the same way
    updates cost more than fresh tokens      to the interval at which effective tokens per second are most, if the
                                             trainer does not wait, or for updates more than for anything else
    the trainer waits                        to the best one up to where it would not wait, if rollouts per second grow
                                             with those in flight, and none that should be below min_ess
    updates cost more than fresh tokens      the same, whatever the trainer waits for
    updates cost less than fresh tokens      to the interval at which effective tokens per second are most
    a lower rung may be as good              there, if nothing is known of it (`_may_be_as_good`)
    else                                     no change

A round is as many steps as batches are in flight: in fewer, waits come in bursts. A trainer that waits for more than
LARGE_WAIT of a round is helped after it, unless a setting has failed before. The batches of a run's first round begin
together: the trainer waits for the first of them, and in a later round will wait for what playing takes longer than
training all of them. That is acted on as well. An effective sample size below min_ess is acted on after EARLY_STEPS,
also in the first round.

What an update costs is measured (`UpdateCosts`): seconds in which the trainer publishes, and in which engines stand
still. The slower side has them 1/k times per step. What it is worth: tokens are (k - 1) / 2 versions older on average,
and the logarithm of the effective sample size grows with their age.

The gain of a level is measured against the highest one below it that is known: d levels more must give d * min_gain.
Where rollouts take very different times ten steps say little, so a level is condemned only if its gain is too small by
more than DOUBT standard errors, which follow from how unequal the steps were. Time, tokens and waits are arguments:
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
DOUBT = 2.5  # standard errors by which the gain of a level must be too small
MOST_TIMES = 4  # the level that one decision goes up to, at most: what older tokens are worth is only estimated
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
    power: float
    """A token is worth the effective sample size to this power."""
    tokens: float = 0.0
    waited_s: float = 0.0
    aged: float = 0.0
    """Tokens times their mean age in versions."""
    squares: float = 0.0
    """The seconds of each step, squared."""
    sizes: list[float] = field(default_factory=list)
    """The effective sample size of each step."""

    def add(self, now: float, tokens: float, ess: float, age: float, waited_s: float) -> None:
        """Add a step."""
        self.tokens += tokens
        self.aged += tokens * age
        self.waited_s += waited_s
        self.squares += (now - self.ended) ** 2
        self.sizes.append(ess)
        self.ended = now

    @property
    def steps(self) -> int:
        return len(self.sizes)

    @property
    def took(self) -> float:
        """Seconds."""
        return self.ended - self.began

    @property
    def ess(self) -> float:
        """The effective sample size, as the upper median of the steps: one token with a ratio of a hundred, which
        losses truncate, takes most of a step's.
        """
        return statistics.median_high(self.sizes) if self.sizes else 1.0

    @property
    def effective(self) -> float:
        """Effective tokens."""
        return float(self.tokens * self.ess**self.power)

    @property
    def age(self) -> float:
        """Mean age of all tokens, in versions."""
        return self.aged / max(self.tokens, 1.0)


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
"""A level, and the steps between two versions that engines get; where it is a key, the level is a rung's."""


class Steering:
    """Chooses the level and the steps between two versions; `level` and `update_interval` are the current ones."""

    def __init__(self, cfg: SteeringSection, level: int, interval: int = 1, *, least_interval: int = 1) -> None:
        """least_interval: weight_broadcast.interval."""
        self.cfg = cfg
        self.update_interval, self._least_interval = interval, least_interval
        self._most_interval = max(cfg.max_update_interval or least_interval, least_interval)
        is_highest, start = level >= cfg.max_level, max(level - (interval - least_interval), cfg.min_level)
        self.rungs = ladder(cfg.min_level, cfg.max_level, start)
        self._rung = self._top(interval) if is_highest else self.rungs.index(start)
        self.costs = UpdateCosts()
        self._num_decisions = 0
        self._speeds: dict[Setting, Speed] = {}
        self._failures: dict[Setting, int] = {}
        self._blocked_until: dict[Setting, int] = {}  # the decision
        self._left_out = self.level + 1  # steps until a change has taken effect
        self._window: Window | None = None
        self._first_round: Window | None = None
        self._first: Decision | None = None  # the one at the end of the first round

    @property
    def level(self) -> int:
        return self._level_at(self._rung, self.update_interval)

    def _level_at(self, rung: int, interval: int) -> int:
        return min(self.rungs[rung] + interval - self._least_interval, self.cfg.max_level)

    def _top(self, interval: int) -> int:
        """The rung that reaches max_level, where engines get a version after so many steps."""
        wanted = self.cfg.max_level - (interval - self._least_interval)
        return next(i for i, each in enumerate(self.rungs) if each >= wanted)

    def start(self, now: float) -> None:
        """Rollouts begin. Without this call the first round says nothing."""
        self._first_round = Window(now, now, self.cfg.ess_power)

    def add_step(
        self, step: int, now: float, tokens: float, metrics: Mapping[str, float], waited_s: float
    ) -> Decision | None:
        """Add a trained step of so many sampled tokens; a decision if it ends a measurement.

        now: seconds of any clock; waited_s: how long the trainer had no batch before this one. metrics: with the
        effective sample size and the mean age of tokens.
        """
        if self._left_out > 0 or self._window is None:
            self._left_out -= 1
            self._window = Window(now, now, self.cfg.ess_power)
            decision = self._in_first_round(step, now, tokens, metrics, waited_s)
        else:
            age = metrics.get(AGE, float(self.level))
            self._window.add(now, tokens, self._ess_of(metrics), age, waited_s)
            decision = self._decide(step, self._window) if self._is_long_enough(self._window) else None
        if decision is not None:
            self._window = Window(now, now, self.cfg.ess_power)
            if decision.is_change:
                self._left_out, self._first_round = max(decision.level, decision.level_before) + 1, None
        return decision

    def _ess_of(self, metrics: Mapping[str, float]) -> float:
        return min(max(metrics.get(f"ess/{self.cfg.effective}", 1.0), 0.0), 1.0)

    def _is_long_enough(self, window: Window) -> bool:
        """Is the measurement over? Early if tokens are worth too little, or the trainer mostly waits."""
        if window.steps % self.update_interval or window.took <= 0:
            return False
        in_round = self.level + 1
        if window.steps >= max(self.cfg.interval, in_round) or self._is_worth_too_little(window):
            return True
        return (
            window.steps >= max(in_round, EARLY_STEPS)
            and window.waited_s > LARGE_WAIT * window.took
            and self._may_help_early()
        )

    def _is_worth_too_little(self, window: Window) -> bool:
        is_lowest = self._rung == 0 and self.update_interval == self._least_interval
        return window.steps >= EARLY_STEPS and window.ess < self.cfg.min_ess and not is_lowest

    def _may_help_early(self) -> bool:
        return not self._failures and self._rung < self._top(self.update_interval)

    def _in_first_round(
        self, step: int, now: float, tokens: float, metrics: Mapping[str, float], waited_s: float
    ) -> Decision | None:
        """A step of the first round: less ahead as soon as tokens are worth too little; more at its end if the trainer
        will plainly wait. None if neither.
        """
        if (window := self._first_round) is None:
            return None
        window.add(now, tokens, self._ess_of(metrics), metrics.get(AGE, 0.0), waited_s)
        if window.took > 0 and self._is_worth_too_little(window):
            return self._change(step, window, *self._down_by_ess(window.ess))
        if self._left_out > 0:
            return None
        self._first_round, busy_s = None, window.took - window.waited_s
        waited = 1 - busy_s / window.waited_s if window.waited_s > busy_s else 0.0
        if waited <= LARGE_WAIT:
            return None
        older = min(max(self.level / window.age, 1.0), 4.0) if window.age > 0 else 1.0  # once all are of later rounds
        window.aged *= older
        ess = statistics.fmean(window.sizes)  # it falls from step to step, as tokens get older
        if (more := self._more(window, ess**older, waited)) is not None:
            self._first = self._change(step, window, *more)
        return self._first

    def _decide(self, step: int, window: Window) -> Decision:
        self._num_decisions += 1
        setting = self._setting(self._rung)
        known = self._speeds.get(setting)
        if known is None or self._is_forgotten(known):
            known = self._speeds[setting] = Speed()
        known.add(window, self._num_decisions)
        waited = min(window.waited_s / window.took, 1.0)
        return self._change(step, window, *self._next(window, window.ess, waited))

    def _change(self, step: int, window: Window, rung: int, interval: int, reason: str) -> Decision:
        """The decision for a rung and an interval, which are the current ones from now on."""
        before, interval_before = self.level, self.update_interval
        self.update_interval, self._rung = interval, min(rung, self._top(interval))
        return Decision(
            step, before, self.level, window.effective / window.took, window.ess,
            min(window.waited_s / window.took, 1.0), reason, interval_before, interval,
            self.costs.publish_s, self.costs.pause_s,
        )  # fmt: skip

    def _next(self, window: Window, ess: float, waited: float) -> tuple[int, int, str]:
        """Rung and interval from now on, and why."""
        cfg, rung, interval = self.cfg, self._rung, self.update_interval
        if ess < cfg.min_ess:
            return self._down_by_ess(ess)
        if (less := self._known_below(rung, interval)) is not None:
            return less
        if (more := self._more(window, ess, waited)) is not None:
            return more
        best = self._best_interval(window, ess, waited)
        if best > interval:
            return rung, best, self._why_rarer(window)
        if best < interval:
            return rung, best, "updates cost less than fresh tokens are worth"
        if self._may_be_as_good(waited):
            return rung - 1, interval, "is a lower level as good?"
        return rung, interval, "no other level is known to be better"

    def _more(self, window: Window, ess: float, waited: float) -> tuple[int, int, str] | None:
        """What a trainer that waits needs: rarer updates, if those are what it waits for, else a higher rung. None if
        neither should give more. Rarer updates are as good for one that never waits.
        """
        cfg, rung, interval = self.cfg, self._rung, self.update_interval
        updates_wait = self.costs.pause_s / interval >= waited * window.took / window.steps / 2
        is_hidden = waited <= cfg.min_wait or updates_wait
        if is_hidden and (rarer := self._best_interval(window, ess, waited)) > interval:
            return rung, rarer, self._why_rarer(window)
        if waited > cfg.min_wait and (up := self._rung_without_wait(waited, ess)) > rung:
            return up, interval, "the trainer waits"
        return None

    def _down_by_ess(self, ess: float) -> tuple[int, int, str]:
        """To where the effective sample size should be above min_ess, but no lower than half the level at once."""
        rung, interval, least = self._rung, self.update_interval, self._least_interval
        if rung == 0 and interval == least:
            return 0, interval, f"ess is below min_ess = {self.cfg.min_ess:g} at the lowest level"
        self._fail(self._setting(rung))
        highest = rung if interval > least else rung - 1
        half = (self.level + 1) // 2  # a few steps say little, and the way back up is long
        levels = {each: self._level_at(each, least) for each in range(highest, 0, -1)}
        lower_rungs = (rung for rung, level in levels.items() if self._is_worth(level, ess) or level <= half)
        return next(lower_rungs, 0), least, f"ess is below min_ess = {self.cfg.min_ess:g}"

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
        below = next((each for each in reversed(range(rung)) if self._speed_of((self.rungs[each], interval))), None)
        if below is None:
            return None
        level, lower_level = self._level_at(rung, interval), self._level_at(below, interval)
        if text := self._shortfall((self.rungs[below], interval), level - lower_level):
            self._fail(self._setting(rung))
            return rung - 1, interval, f"level {level} gives {text[0]} over level {lower_level} and must give {text[1]}"
        return None

    def _shortfall(self, below: Setting, steps: int) -> tuple[str, str] | None:
        """What this setting gives over another, and what it must give; None if that is not too little for sure.

        steps: of the level, or between updates, that it has more.
        """
        own, other = self._speeds[self._setting(self._rung)], self._speeds[below]
        if other.mean <= 0:
            return None
        gain, wanted = own.mean / other.mean - 1, self.cfg.min_gain * steps
        if (1 + gain) * math.exp(DOUBT * math.hypot(own.error, other.error)) >= 1 + wanted:
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
        return float(faster * (self._ess_at(interval, window, ess) / ess) ** self.cfg.ess_power - 1)

    def _ess_at(self, interval: int, window: Window, ess: float) -> float:
        """The effective sample size with another interval: its logarithm grows with the mean age."""
        older = (interval - self.update_interval) / 2
        return float(min(ess, 1.0) ** max(1 + older / window.age, 0.0)) if window.age > 0 else ess

    # -- how far ahead --

    def _rung_without_wait(self, waited: float, ess: float) -> int:
        """The best rung up to the one at which the trainer would not wait, or the next one, at most MOST_TIMES the
        level, below those that have failed lately or would be below min_ess; the current one if none should be better.
        """
        interval = self.update_interval
        wanted = (self.level + 1) / max(1 - waited, 0.05) - 1
        best, most = self._rung, 1.0
        for up in range(self._rung + 1, self._top(interval) + 1):
            level = self._level_at(up, interval)
            is_blocked = self._blocked_until.get((self.rungs[up], interval), 0) > self._num_decisions
            is_far = up > self._rung + 1 and level > min(wanted, MOST_TIMES * self.level)
            if is_blocked or is_far or not self._is_worth(level, ess):
                break
            if (promise := self._promise(up, waited, ess)) > most:
                best, most = up, promise
        return best

    def _may_be_as_good(self, waited: float) -> bool:
        """Whether to look at the rung below, of which nothing is known. Where the trainer plainly waits, only if this
        level, measured twice, has not given what it must over the next one that is known, or the first round's.
        """
        interval = self.update_interval
        speeds = [self._speed_of((each, interval)) for each in self.rungs[: self._rung]]
        if not speeds or speeds[-1] is not None:
            return False
        means = {self._level_at(at, interval): speed.mean for at, speed in enumerate(speeds) if speed is not None}
        if not means and self._first is not None:
            means = {self._first.level_before: self._first.effective_tokens_per_s}
        if waited <= LARGE_WAIT or not means:
            return True
        wanted = 1 + self.cfg.min_gain * (self.level - max(means))
        own = self._speeds[self._setting(self._rung)]
        return own.num > 1 and own.mean < wanted * means[max(means)]

    def _promise(self, rung: int, waited: float, ess: float) -> float:
        """What a higher rung should give of effective tokens per second, relative to the current one, where each level
        counts min_gain. Rollouts per second grow with those in flight, as long as the trainer waits, if what the rung
        has given is not less for sure.
        """
        level = self._level_at(rung, self.update_interval)
        fee = (1 + self.cfg.min_gain) ** (self.level - level)
        own, known = (self._speed_of(self._setting(each)) for each in (self._rung, rung))
        if own is not None and known is not None and own.mean > 0:
            given = fee * known.mean / own.mean
            if given * math.exp(DOUBT * math.hypot(own.error, known.error)) < 1:
                return given
        faster = min((level + 1) / (self.level + 1), 1 / max(1 - waited, 0.05))
        fresher = max(ess, 1e-9) ** (self.cfg.ess_power * (level / self.level - 1))
        return float(faster * fresher * fee)

    def _is_worth(self, level: int, ess: float) -> bool:
        """Whether min_ess should hold at this level, where `ess` is that of the current one."""
        return bool(ess ** (level / self.level) >= self.cfg.min_ess)

    def _setting(self, rung: int) -> Setting:
        return self.rungs[rung], self.update_interval

    def _speed_of(self, setting: Setting) -> Speed | None:
        """What was measured of a setting; None if that is forgotten, or so little that it says nothing."""
        speed = self._speeds.get(setting)
        is_known = speed is not None and speed.steps >= EARLY_STEPS and not self._is_forgotten(speed)
        return speed if is_known else None

    def _is_forgotten(self, speed: Speed) -> bool:
        return self._num_decisions - speed.at >= MEMORY

    def _fail(self, setting: Setting) -> None:
        self._failures[setting] = failures = self._failures.get(setting, 0) + 1
        self._blocked_until[setting] = self._num_decisions + self.cfg.retry * 2 ** (failures - 1)


def ladder(low: int, high: int, start: int) -> list[int]:
    """The levels from low to high: 1, 2, 3, 4, 6, 8, 12, 16, ..., both bounds, and where a run starts."""
    rungs, power = {1, 2, 3, high, low, start}, 4
    while power <= high:
        rungs |= {power, power * 3 // 2}
        power *= 2
    return sorted(rung for rung in rungs if low <= rung <= high)


def within(cfg: SteeringSection, level: int, interval: int, least_interval: int) -> Setting:
    """A level and an interval of updates, brought between the bounds; least_interval: weight_broadcast.interval."""
    interval = min(max(interval, least_interval), max(cfg.max_update_interval or 1, least_interval))
    return min(max(level, cfg.min_level + interval - least_interval), cfg.max_level), interval
