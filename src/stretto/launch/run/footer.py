"""What stands below the lines of a run on a terminal: progress, reward as a sparkline, who waits, alerts.

In: the status lines of a run, in order. Out: lines of text without colours, none wider than asked for. Progress of
parts (an eval, a checkpoint) has a bar of its own with the time that is left.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.base.status import duration, quantity

WINDOW = 50  # steps over which the time left is estimated
BAR_CELLS = 30
NARROW = 60  # columns below which there is no room for bars
REWARDS = 200
SHOWN_ALERTS = 2
LEVELS = "▁▂▃▄▅▆▇█"
SLOW_PHASE_S = 3.0


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
        self._parts: dict[
            str, tuple[float, float, int, int]
        ] = {}  # text -> first time, now, first done, done, ...
        self._totals: dict[str, int] = {}
        self._alerts: deque[str] = deque(maxlen=SHOWN_ALERTS)
        self._num_alerts = 0

    @property
    def arrivals(self) -> list[tuple[int, float]]:
        """Steps and when they came, the latest ones."""
        return list(self._arrivals)

    def set_phase(self, text: str) -> None:
        """What the run does while it trains no step; "" if it does."""
        if text != self._phase:
            self._phase, self._phase_at = text, self._clock()

    def add_step(self, status: Mapping[str, Any]) -> None:
        """A step that is trained."""
        self.step = int(status.get("step", 0))
        self.max_steps = status.get("max_steps") or self.max_steps
        self._arrivals.append((self.step, self._clock()))
        self.set_phase("")
        self._status = status
        if isinstance(reward := status.get("reward"), int | float) and math.isfinite(reward):
            self._rewards.append(float(reward))

    def add_alert(self, text: str) -> None:
        """A warning of any process."""
        self._num_alerts += 1
        self._alerts.append(text)

    def set_progress(self, text: str, done: int, total: int) -> None:
        """How far a part is; it goes away when it is done."""
        if done >= total:
            self._parts.pop(text, None)
            return
        now = self._clock()
        started_at, _, first, _ = self._parts.get(text, (now, now, done, done))
        self._parts[text] = (started_at, now, first, done)
        self._totals[text] = total

    def lines(self, width: int) -> list[str]:
        """The lines, each of at most width characters."""
        found = [self._main(width), *self._details(width)]
        found += [
            part_line(text, *part, self._totals[text], width=width) for text, part in self._parts.items()
        ]
        if self._num_alerts:
            found += [f"! {text}" for text in self._alerts]
            if self._num_alerts > len(self._alerts):
                found[-1] += f"  ({self._num_alerts} warnings)"
        return [line.replace("\n", " ")[: max(width, 1)] for line in found]

    def _main(self, width: int) -> str:
        if self._phase:
            waited_s = self._clock() - self._phase_at
            return f"... {self._phase}" + (f" ({duration(waited_s)})" if waited_s >= SLOW_PHASE_S else "")
        if not self.max_steps:
            return f"step {self.step}, no last step set"
        left = time_left(self.arrivals, self.max_steps)
        ending = "" if left is None else f"  {duration(left)} left"
        share = min(self.step / self.max_steps, 1.0)
        return f"{bar(share, width)}{share:4.0%}  step {self.step}/{self.max_steps}{ending}"

    def _details(self, width: int) -> list[str]:
        """Reward and waits, once there are two steps."""
        if len(self._arrivals) < 2:
            return []
        found = []
        if len(self._rewards) > 1:
            low, high = min(self._rewards), max(self._rewards)
            about = f" {self._rewards[-1]:.3f} ({low:.3f} to {high:.3f})"
            found.append(f"reward {sparkline(self._rewards, max(width - 7 - len(about), 8))}{about}")
        status, parts = self._status, []
        if waits := status.get("waits"):
            parts.append("waits: " + " ".join(f"{who} {share:.0%}" for who, share in waits.items()))
        if (speed := status.get("tokens_per_s")) is not None:
            parts.append(f"{quantity(speed)} tok/s")
        if (staleness := status.get("staleness")) is not None:
            parts.append(f"staleness {staleness:.1f}")
        return [*found, " | ".join(parts)] if parts else found


def bar(share: float, width: int) -> str:
    """A bar of BAR_CELLS cells and a space; "" on a narrow terminal."""
    if width < NARROW:
        return ""
    filled = round(share * BAR_CELLS)
    return "━" * filled + "╌" * (BAR_CELLS - filled) + " "


def part_line(
    text: str, started_at: float, now: float, first: int, done: int, total: int, *, width: int
) -> str:
    """`━━━╌╌╌  40%  eval 40/100  12s left`; without the bar on a narrow terminal."""
    left = (now - started_at) / (done - first) * (total - done) if done > first else None
    ending = "" if left is None else f"  {duration(left)} left"
    if width < NARROW:
        return f"{text} {done}/{total}{ending}"
    return f"{bar(done / total, width)}{done / total:4.0%}  {text} {done}/{total}{ending}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, the latest on the right; means where there are more than width."""
    width = max(1, min(width, len(values)))
    values = list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return LEVELS[0] * width
    return "".join(
        LEVELS[min(int((mean - low) / (high - low) * len(LEVELS)), len(LEVELS) - 1)] for mean in means
    )


def time_left(arrivals: list[tuple[int, float]], max_steps: int) -> float | None:
    """Seconds to the last step at the speed of the latest steps; None before the second step."""
    if len(arrivals) < 2:
        return None
    (first_step, first_at), (last_step, last_at) = arrivals[0], arrivals[-1]
    if last_step <= first_step:
        return None
    return (max_steps - last_step) * (last_at - first_at) / (last_step - first_step)
