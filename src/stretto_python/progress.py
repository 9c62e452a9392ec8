"""How far a run is, as a bar and a curve that grow: drawn anew in one display of a notebook, or as one line of text."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Sequence
from typing import Any

from stretto.base.errors import DataError
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.base.status import duration
from stretto.monitors.file import MetricsTail, is_number, moving_mean

_KEYS = {"orchestrator": ("reward/mean", "mean reward"), "sft": ("nll/mean", "nats per token")}
"""By role whose metrics say how far a run is: what is drawn, and its name."""
_SIZE = (640, 170)
_MARGINS = (44, 14, 8, 22)  # left, right, top, bottom
_RAW, _SMOOTH, _SAMPLED, _GREEDY, _INK = "#a9c7e8", "#1f5fa8", "#d1495b", "#2a9d6f", "#777777"
_MAX_POINTS = 4096
_NUM_LINES = 6


class Progress:
    """What is known of a run that goes on, or has ended."""

    def __init__(self, run: RunDir, *, is_own: bool = False) -> None:
        """is_own: this process has started the run; else it is only looked at."""
        self.run, self.is_own = run, is_own
        self.lines: list[str] = []
        """The last lines that its process has printed."""
        self.state = ""
        self.part: tuple[str, int, int] | None = None
        """What is done now, how much of it, and of how much (0: not known); None for what has steps."""
        self._tails = {role: MetricsTail(run.metrics(role), max_rows=_MAX_POINTS) for role in _KEYS}
        self._first: tuple[int, float] | None = None  # step and monotonic time of the first step that was seen

    def refresh(self) -> None:
        """Read what the run has written since."""
        for tail in self._tails.values():
            try:
                tail.refresh()
            except DataError:  # looked at again with the next call
                continue
        if self._first is None and self.step:
            self._first = (self.step, time.monotonic())

    @property
    def role(self) -> str:
        return next((role for role, tail in self._tails.items() if tail.rows()), "orchestrator")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._tails[self.role].rows()

    @property
    def step(self) -> int:
        """The last step that is logged; 0 before the first."""
        return int(max((row["step"] for row in self.rows), default=0))

    @property
    def max_steps(self) -> int | None:
        return read_json(self.run.config("run")).get("max_steps")

    @property
    def share(self) -> float:
        """How much of it is done, 0 to 1."""
        if self.part is not None:
            return 1.0 if self.state == "done" else self.part[1] / max(self.part[2], 1)
        return self.step / self.max_steps if self.max_steps else 0.0

    def left_s(self) -> float | None:
        """Seconds until the last step, as the steps that were seen took; None if not known."""
        if self._first is None or not self.max_steps or self.step <= self._first[0]:
            return None
        per_step = (time.monotonic() - self._first[1]) / (self.step - self._first[0])
        return max(0.0, (self.max_steps - self.step) * per_step)

    def curve(self) -> list[tuple[int, float]]:
        """The reward, or the loss of `sft`, by step."""
        key = _KEYS[self.role][0]
        return [(row["step"], row[key]) for row in self.rows if row["step"] and is_number(row.get(key))]

    def held_out(self, mode: str) -> list[tuple[int, float]]:
        """The mean over environments of every eval."""
        found = []
        for row in self.rows:
            names = [name for name in row if name.startswith("eval/") and name.endswith(f"/{mode}/mean")]
            if values := [row[name] for name in names if is_number(row[name])]:
                found.append((int(row["step"]), sum(values) / len(values)))
        return found

    def title(self) -> str:
        """One line: the run, its state, its step, its reward, the time left."""
        of = f" of {self.max_steps}" if self.max_steps else ""
        parts = [self.run.path.name, self.state, f"step {self.step}{of}" if self.step else ""]
        if self.part is not None and self.state == "running":
            text, done, total = self.part
            parts.append(f"{text}: {done} of {total}" if total else text)
        if curve := self.curve():
            values = moving_mean([value for _, value in curve])
            parts.append(f"{_KEYS[self.role][1]} {values[0]:.3f} -> {values[-1]:.3f}")
        for mode in ("sampled", "greedy"):
            if points := self.held_out(mode):
                parts.append(
                    f"held out, {mode} " + " -> ".join(f"{points[i][1]:.3f}" for i in sorted({0, len(points) - 1}))
                )
        if self.is_own and self.state == "running" and (left := self.left_s()) is not None:
            parts.append(f"{duration(left)} left")
        return " · ".join(part for part in parts if part)

    def __repr__(self) -> str:
        return self.title()

    def _repr_html_(self) -> str:
        share = min(1.0, self.share)
        color = {"failed": _SAMPLED, "running": _SMOOTH}.get(self.state, _GREEDY)
        bar = (
            f'<div style="background:#8883;height:6px;border-radius:3px;margin:4px 0;max-width:{_SIZE[0]}px">'
            f'<div style="background:{color};width:{100 * share:.1f}%;height:6px;border-radius:3px"></div></div>'
        )
        has_lines = self.state in ("running", "failed") or self.part is not None  # an evaluation ends with its table
        lines = "\n".join(self.lines[-_NUM_LINES:]) if has_lines else ""
        log = f'<pre style="font-size:11px;opacity:.75;margin:2px 0">{html.escape(lines)}</pre>' if lines else ""
        inside = f"{html.escape(self.title())}{bar}{self.svg()}{log}"
        return f'<div style="font-family:sans-serif;font-size:13px">{inside}</div>'

    def svg(self) -> str:
        """The curve; "" before there are two points."""
        curve = self.curve()
        points = {"sampled": self.held_out("sampled"), "greedy": self.held_out("greedy")}
        every = [*curve, *points["sampled"], *points["greedy"]]
        if len(every) < 2:
            return ""
        width, height = _SIZE
        left, right, top, bottom = _MARGINS
        first, last = min(step for step, _ in every), max(step for step, _ in every)
        last = max(last, self.max_steps or 0, first + 1)
        low, high = min(value for _, value in every), max(value for _, value in every)
        high = high if high > low else low + 1.0

        def place(point: tuple[int, float]) -> tuple[float, float]:
            x = left + (point[0] - first) / (last - first) * (width - left - right)
            return x, top + (high - point[1]) / (high - low) * (height - top - bottom)

        smooth = list(zip([step for step, _ in curve], moving_mean([value for _, value in curve])))
        parts = [_line([place(point) for point in curve], _RAW, 1), _line([place(p) for p in smooth], _SMOOTH, 2)]
        for mode, color in (("greedy", _GREEDY), ("sampled", _SAMPLED)):
            spots = [place(point) for point in points[mode]]
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in spots]
        text = f'font-size="10" fill="{_INK}"'
        parts += [f'<text x="{left - 6}" y="{top + 8}" text-anchor="end" {text}>{high:.2f}</text>']
        parts += [f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end" {text}>{low:.2f}</text>']
        legend = f"{_KEYS[self.role][1]}" + (
            ", held out: sampled (red), greedy (green)" if any(points.values()) else ""
        )
        parts += [f'<text x="{left}" y="{height - 6}" {text}>step {first} to {last}: {legend}</text>']
        return f'<svg width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


class Display:
    """One output of a notebook's cell that is drawn anew as the run goes on."""

    def __init__(self, progress: Progress) -> None:
        from IPython.display import display

        self.progress = progress
        self._drawn = ""
        self._handle: Any = display(progress, display_id=True)  # type: ignore[no-untyped-call]

    def line(self, text: str) -> None:
        self.progress.lines = [*self.progress.lines[-_NUM_LINES:], text]

    def tick(self) -> None:
        """Draw it if it has changed."""
        self.progress.refresh()
        if (drawn := self.progress._repr_html_()) != self._drawn:
            self._drawn = drawn
            self._handle.update(self.progress)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can draw an output anew."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")  # type: ignore[no-untyped-call]


def _line(points: Sequence[tuple[float, float]], color: str, width: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'
