"""The console of a run: one line per step, and on a terminal a footer of a few lines that is redrawn (footer.py).

In: status lines (schema in base/status.py) and texts. A pipe, a file and a terminal that cannot move its cursor
(TERM=dumb) get no footer, and step lines at most every half second; the last one is always written.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from stretto.base.status import duration, printable, quantity
from stretto.launch.run.footer import Footer, time_left

_MIN_INTERVAL_S = 0.5  # between step lines in a pipe
_REDRAW_S = 0.1
_TICK_S = 1.0  # between drawings without new lines
_MIN_PROGRESS_S = 15.0  # between lines about the progress of one part in a pipe
_DROPPED_FIRST = ("waits", "loss", "tokens_per_s", "staleness", "truncated", "length")
"""Parts of a step's line that are left out, in this order, until it fits the terminal; the footer has most of them."""


class Console:
    """Writes lines above the footer. Not thread-safe."""

    def __init__(
        self, stream: TextIO, *, max_steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._footer = Footer(max_steps, clock)
        self._clock = clock
        self._is_tty = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_color = self._is_tty and "NO_COLOR" not in os.environ
        self._delayed_line: str | None = None  # a step line that came soon after the last
        self._printed_at = float("-inf")
        self._drawn_at = float("-inf")
        self._drawn: list[str] = []
        self._progress_at: dict[str, float] = {}
        self._is_closed = False

    def show(self, status: Mapping[str, Any]) -> None:
        """Show one status line; unknown kinds are ignored."""
        kind = status.get("kind")
        if kind == "step":
            self._show_step(status)
        elif kind == "eval":
            self._footer.set_phase("")
            self.line(eval_line(status))
        elif kind == "note":
            self.line(str(status.get("text", "")))
        elif kind == "warning":
            role, text = status.get("role", "run"), printable(str(status.get("text", "")))
            self._footer.add_alert(f"{role}: {text}")
            self.line(f"warning ({role}): {text}")
        elif kind == "progress":
            self._show_progress(str(status.get("text", "")), int(status.get("done", 0)), int(status.get("total", 1)))
        elif kind == "phase":
            text = str(status.get("text", ""))
            self._footer.set_phase(text)
            if self._is_tty:
                self._draw(is_forced=True)
            else:
                self.line(text)

    def tick(self) -> None:
        """Redraw the footer every _TICK_S, so that its times advance."""
        if self._drawn and self._clock() - self._drawn_at >= _TICK_S:
            self._draw(is_forced=True)

    def line(self, text: str) -> None:
        """Write a text above the footer."""
        if not text:
            return
        self._write_delayed_line()
        self._write(text)

    def close(self) -> None:
        """Write a delayed step line, and remove the footer."""
        self._write_delayed_line()
        self._clear()
        self._is_closed = True
        self._flush()

    def _show_step(self, status: Mapping[str, Any]) -> None:
        now = self._clock()
        footer = self._footer
        footer.add_step(status)
        left_s = None
        if footer.last_step and not self._is_tty:  # on a terminal the footer shows it
            left_s = time_left(footer.arrivals, footer.last_step)
        columns = shutil.get_terminal_size().columns - 1 if self._is_tty else None
        text = step_line(status, footer.max_steps, left_s=left_s, columns=columns)
        if self._is_tty or now - self._printed_at >= _MIN_INTERVAL_S or footer.step == footer.max_steps:
            self._delayed_line = None
            self._write(text)
            self._printed_at = now
        else:
            self._delayed_line = text

    def _write_delayed_line(self) -> None:
        if self._delayed_line is not None:
            line, self._delayed_line = self._delayed_line, None
            self._write(line)
            self._printed_at = self._clock()

    def _write(self, text: str) -> None:
        self._clear()
        self._put(text + "\n")
        self._draw()
        self._flush()

    def _show_progress(self, text: str, done: int, total: int) -> None:
        self._footer.set_progress(text, done, total)
        if self._is_tty:
            self._draw()
            return
        now = self._clock()
        if now - self._progress_at.setdefault(text, now) >= _MIN_PROGRESS_S and done < total:
            self._progress_at[text] = now
            self.line(f"{text} {done}/{total}")

    def _clear(self) -> None:
        """Remove the footer; a terminal that has become narrower wraps its long lines."""
        if self._drawn:
            columns = max(shutil.get_terminal_size().columns, 1)
            rows = sum(max(1, -(-len(line) // columns)) for line in self._drawn)
            up = f"\x1b[{rows - 1}A" if rows > 1 else ""
            self._put(f"\r{up}\x1b[J")
            self._drawn = []

    def _draw(self, *, is_forced: bool = False) -> None:
        if not self._is_tty or self._is_closed:
            return
        now = self._clock()
        if not is_forced and now - self._drawn_at < _REDRAW_S and self._drawn:
            return
        self._drawn_at = now
        size = shutil.get_terminal_size()
        lines = self._footer.lines(size.columns - 1)[: max(1, size.lines - 2)]
        self._clear()
        self._put("\n".join(f"\x1b[2m{line}\x1b[0m" if self._has_color else line for line in lines))
        self._drawn = lines
        self._flush()

    def _put(self, text: str) -> None:
        with self._ignore_closed_terminal():
            self._stream.write(text)

    def _flush(self) -> None:
        with self._ignore_closed_terminal():
            self._stream.flush()

    @contextmanager
    def _ignore_closed_terminal(self) -> Iterator[None]:
        """If the terminal was closed, write to nowhere from now on: the run still has to stop and save."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._is_tty, self._drawn = False, []
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def step_line(
    status: Mapping[str, Any], max_steps: int | None, *, left_s: float | None = None, columns: int | None = None
) -> str:
    """`step 12/300 | reward 0.41 | entropy 0.92 | ...`, without missing values, in at most `columns` if it can be."""
    step = int(status.get("step", 0))
    staleness_max = status.get("staleness_max")
    maximum = "" if staleness_max is None else f" (max {staleness_max:.0f})"
    until = "" if status.get("budget_step") is None else f" (to step {status['budget_step']:.0f})"
    shown: dict[str, Callable[[Any], str]] = {
        "reward": lambda reward: f"reward {reward:.3f}",
        "entropy": lambda entropy: f"entropy {entropy:.2f}",
        "length": lambda tokens: f"length {quantity(tokens)}",
        "truncated": lambda share: f"cut {share:.0%}" if share else "",
        "mismatch_kl": lambda mismatch: f"mismatch kl {mismatch:.1e}",
        "staleness": lambda staleness: f"staleness {staleness:.1f}{maximum}",
        "tokens_per_s": lambda speed: f"{quantity(speed)} tok/s",
        "budget": lambda share: f"budget {share:.0%}{until}",
        "left": lambda seconds: f"{duration(seconds)} left",
        "loss": lambda loss: f"loss {loss:8.5f}",
        "waits": lambda waits: (
            "waits: " + " ".join(f"{who} {share:.0%}" for who, share in waits.items()) if waits else ""
        ),
    }
    values = {**status, "left": left_s}
    parts = {key: form(values[key]) for key, form in shown.items() if values.get(key) is not None}
    head = f"step {step:>{len(str(max_steps))}}/{max_steps}" if max_steps else f"step {step}"
    for dropped in ("", *_DROPPED_FIRST):
        parts.pop(dropped, None)
        line = " | ".join([head, *filter(None, parts.values())])
        if columns is None or len(line) <= columns:
            break
    return line


def eval_line(status: Mapping[str, Any]) -> str:
    """`eval at step 40 | sampled 0.41 | greedy 0.55`."""
    parts = [f"eval at step {status.get('step', 0)}"]
    if env := status.get("env"):
        parts[0] += f" on {env}"
    for name in ("sampled", "greedy"):
        if (value := status.get(name)) is not None:
            parts.append(f"{name} {value:.3f}")
    return " | ".join(parts)
