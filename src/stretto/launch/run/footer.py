"""The footer below the lines of a run on a terminal: progress, reward as a sparkline, waits, alerts.

In: the status lines of a run, in order. Out: lines of text without colours, none wider than the given width. Parts that
are under way (an eval, a checkpoint) have a progress bar each, with the time that is left.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stretto.base.status import duration, quantity

WINDOW = 50  # steps over which the time left is estimated
BAR_CELLS = 30
NARROW = 60  # columns below which there is no room for bars
REWARDS = 200
SHOWN_ALERTS = 2
LEVELS = "▁▂▃▄▅▆▇█"
SLOW_PHASE_S = 3.0


class Part(NamedTuple):
    """A part of the run that is under way, such as an eval."""

    started_at: float
    """Seconds of the footer's clock, as updated_at."""
    updated_at: float
    first_done: int
    """How much was done when it was first reported."""
    done: int
    total: int


class Footer:
    """The state that the lines are made from."""

    def __init__(self, max_steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_steps = max_steps
        self.step = 0
        self._clock = clock
        self._phase, self._phase_at = "starting", clock()
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._rewards: deque[float] = deque(maxlen=REWARDS)
        self._status: Mapping[str, Any] = {}
        self._parts: dict[str, Part] = {}
        self._alerts: deque[str] = deque(maxlen=SHOWN_ALERTS)
        self._num_alerts = 0

    @property
    def arrivals(self) -> list[tuple[int, float]]:
        """The latest steps, each with the time at which it was reported."""
        return list(self._arrivals)

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends: the last one, or that with which its budget would end."""
        budget_step = self._status.get("budget_step")
        ends = [int(step) for step in (self.max_steps, budget_step) if step]
        return min(ends, default=None)

    def set_phase(self, text: str) -> None:
        """Set what the run does while no step is trained; "" once steps are trained."""
        if text != self._phase:
            self._phase, self._phase_at = text, self._clock()

    def add_step(self, status: Mapping[str, Any]) -> None:
        """Add a trained step."""
        self.step = int(status.get("step", 0))
        self.max_steps = status.get("max_steps") or self.max_steps
        self._arrivals.append((self.step, self._clock()))
        self.set_phase("")
        self._status = status
        if isinstance(reward := status.get("reward"), int | float) and math.isfinite(reward):
            self._rewards.append(float(reward))

    def add_alert(self, text: str) -> None:
        """Add a warning of any process."""
        self._num_alerts += 1
        self._alerts.append(text)

    def set_progress(self, text: str, done: int, total: int) -> None:
        """Set how far a part is; it is removed when it is done."""
        if done >= total:
            self._parts.pop(text, None)
            return
        now = self._clock()
        before = self._parts.get(text, Part(now, now, done, done, total))
        self._parts[text] = Part(before.started_at, now, before.first_done, done, total)

    def lines(self, width: int) -> list[str]:
        """The lines, each of at most width characters."""
        lines = [self._main(width), *self._details(width)]
        lines += [part_line(text, part, width=width) for text, part in self._parts.items()]
        if self._num_alerts:
            lines += [f"! {text}" for text in self._alerts]
            if self._num_alerts > len(self._alerts):
                lines[-1] += f"  ({self._num_alerts} warnings)"
        return [line.replace("\n", " ")[: max(width, 1)] for line in lines]

    def _main(self, width: int) -> str:
        if self._phase:
            waited_s = self._clock() - self._phase_at
            return f"... {self._phase}" + (f" ({duration(waited_s)})" if waited_s >= SLOW_PHASE_S else "")
        if not (last := self.last_step):
            return f"step {self.step}, no last step set"
        left, budget = time_left(self.arrivals, last), self._status.get("budget")
        ending = "" if left is None else f"  {duration(left)} left"
        ending += "" if budget is None else f"  budget {budget:.0%}"
        share, about = min(self.step / last, 1.0), "" if last == self.max_steps else "about "
        return f"{bar(share, width)}{share:4.0%}  step {self.step}/{about}{last}{ending}"

    def _details(self, width: int) -> list[str]:
        """Reward and waits, once there are two steps."""
        if len(self._arrivals) < 2:
            return []
        lines = []
        if len(self._rewards) > 1:
            low, high = min(self._rewards), max(self._rewards)
            numbers = f" {self._rewards[-1]:.3f} ({low:.3f} to {high:.3f})"
            lines.append(f"reward {sparkline(self._rewards, max(width - 7 - len(numbers), 8))}{numbers}")
        status, parts = self._status, []
        if waits := status.get("waits"):
            parts.append("waits: " + " ".join(f"{who} {share:.0%}" for who, share in waits.items()))
        if (speed := status.get("tokens_per_s")) is not None:
            parts.append(f"{quantity(speed)} tok/s")
        if (staleness := status.get("staleness")) is not None:
            parts.append(f"staleness {staleness:.1f}")
        return [*lines, " | ".join(parts)] if parts else lines


def bar(share: float, width: int) -> str:
    """A bar of BAR_CELLS cells and a space; "" on a narrow terminal."""
    if width < NARROW:
        return ""
    filled = round(share * BAR_CELLS)
    return "━" * filled + "╌" * (BAR_CELLS - filled) + " "


def part_line(text: str, part: Part, *, width: int) -> str:
    """`━━━╌╌╌  40%  eval 40/100  12s left`; without the bar on a narrow terminal."""
    ending, done, total = "", part.done, part.total
    if done > part.first_done:
        time_per_unit = (part.updated_at - part.started_at) / (done - part.first_done)
        ending = f"  {duration(time_per_unit * (total - done))} left"
    if width < NARROW:
        return f"{text} {done}/{total}{ending}"
    return f"{bar(done / total, width)}{done / total:4.0%}  {text} {done}/{total}{ending}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, the latest on the right; if there are more than width, their means."""
    width = max(1, min(width, len(values)))
    values = list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return LEVELS[0] * width
    return "".join(LEVELS[min(int((mean - low) / (high - low) * len(LEVELS)), len(LEVELS) - 1)] for mean in means)


def time_left(arrivals: list[tuple[int, float]], max_steps: int) -> float | None:
    """Seconds to the last step at the speed of the latest steps; None before the second step."""
    if len(arrivals) < 2:
        return None
    (first_step, first_at), (last_step, last_at) = arrivals[0], arrivals[-1]
    if last_step <= first_step:
        return None
    return (max_steps - last_step) * (last_at - first_at) / (last_step - first_step)
