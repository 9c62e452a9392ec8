"""The console of a run: one line per step, and on a terminal a progress bar below them.

In: status lines (schema in base/status.py) and texts. A pipe or a file gets no bar, and step lines at most every half
second; the last one is always written.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from stretto.base.status import duration, quantity

_MIN_INTERVAL_S = 0.5  # between step lines in a pipe
_REDRAW_S = 0.1
_WINDOW = 50  # steps over which the time left is estimated
_BAR_CELLS = 30
_WIDE_COLUMNS = 150


class Console:
    """Writes lines above a progress bar. Not thread-safe."""

    def __init__(
        self, stream: TextIO, *, max_steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._max_steps = max_steps
        self._clock = clock
        self._is_tty = stream.isatty()
        self._has_color = self._is_tty and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._phase = "starting"
        self._step = 0
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._delayed_line: str | None = None  # a step line that came soon after the last
        self._printed_at = float("-inf")
        self._drawn_at = float("-inf")
        self._has_bar = False
        self._is_closed = False

    def show(self, status: Mapping[str, Any]) -> None:
        """Show one status line; a kind that this version does not know is ignored."""
        kind = status.get("kind")
        if kind == "step":
            self._show_step(status)
        elif kind == "eval":
            self._phase = ""
            self.line(eval_line(status))
        elif kind == "note":
            self.line(str(status.get("text", "")))
        elif kind == "warning":
            self.line(f"warning ({status.get('role', 'run')}): {status.get('text', '')}")
        elif kind == "phase":
            self._phase = str(status.get("text", ""))
            if self._is_tty:
                self._draw(is_forced=True)
            else:
                self.line(self._phase)

    def line(self, text: str) -> None:
        """Write lines above the bar."""
        if not text:
            return
        self._write_delayed_line()
        self._write(text)

    def close(self) -> None:
        """Write a delayed step line, and remove the bar."""
        self._write_delayed_line()
        self._clear()
        self._is_closed = True
        self._stream.flush()

    def _show_step(self, status: Mapping[str, Any]) -> None:
        now = self._clock()
        self._step = int(status.get("step", 0))
        self._max_steps = status.get("max_steps") or self._max_steps
        self._arrivals.append((self._step, now))
        self._phase = ""
        left_s = None
        if self._max_steps and not self._is_tty:  # on a terminal the bar has it
            left_s = time_left(list(self._arrivals), self._max_steps)
        is_wide = not self._is_tty or shutil.get_terminal_size().columns >= _WIDE_COLUMNS
        text = step_line(status, self._max_steps, left_s=left_s, is_wide=is_wide)
        if self._is_tty or now - self._printed_at >= _MIN_INTERVAL_S or self._step == self._max_steps:
            self._delayed_line = None
            self._write(text)
            self._printed_at = now
        else:
            self._delayed_line = text

    def _write_delayed_line(self) -> None:
        if self._delayed_line is not None:
            held, self._delayed_line = self._delayed_line, None
            self._write(held)
            self._printed_at = self._clock()

    def _write(self, text: str) -> None:
        self._clear()
        self._stream.write(text + "\n")
        self._draw()
        self._stream.flush()

    def _clear(self) -> None:
        if self._has_bar:
            self._stream.write("\r\x1b[2K")
            self._has_bar = False

    def _draw(self, *, is_forced: bool = False) -> None:
        if not self._is_tty or self._is_closed:
            return
        now = self._clock()
        if not is_forced and now - self._drawn_at < _REDRAW_S and self._has_bar:
            return
        self._drawn_at = now
        self._clear()
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(self._dim(self._bar()[:width]))
        self._has_bar = True
        self._stream.flush()

    def _bar(self) -> str:
        if self._phase:
            return f"... {self._phase}"
        if not self._max_steps:
            return f"step {self._step}, no last step set"
        share = min(self._step / self._max_steps, 1.0)
        filled = round(share * _BAR_CELLS)
        left = time_left(list(self._arrivals), self._max_steps)
        ending = "" if left is None else f"  {duration(left)} left"
        bar = "━" * filled + "╌" * (_BAR_CELLS - filled)
        return f"{bar} {share:4.0%}  step {self._step}/{self._max_steps}{ending}"

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._has_color else text


def step_line(
    status: Mapping[str, Any], max_steps: int | None, *, left_s: float | None = None, is_wide: bool = True
) -> str:
    """`step 12/300 | reward 0.41 | entropy 0.92 | ...`, without missing values; loss and waits only if wide."""
    step = int(status.get("step", 0))
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}" if max_steps else f"step {step}"]
    shown: dict[str, Callable[[float], str]] = {
        "reward": lambda reward: f"reward {reward:.3f}",
        "entropy": lambda entropy: f"entropy {entropy:.2f}",
        "length": lambda tokens: f"length {quantity(tokens)}",
        "truncated": lambda share: f"cut {share:.0%}" if share else "",
        "mismatch_kl": lambda mismatch: f"mismatch kl {mismatch:.1e}",
        "staleness": lambda staleness: f"staleness {staleness:.1f}{_maximum(status.get('staleness_max'))}",
        "tokens_per_s": lambda speed: f"{quantity(speed)} tok/s",
    }
    parts += [form(status[key]) for key, form in shown.items() if status.get(key) is not None]
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    if is_wide and (loss := status.get("loss")) is not None:
        parts.append(f"loss {loss:8.5f}")
    if is_wide and (waits := status.get("waits")):
        parts.append("waits: " + " ".join(f"{who} {share:.0%}" for who, share in waits.items()))
    return " | ".join(filter(None, parts))


def _maximum(staleness: float | None) -> str:
    return "" if staleness is None else f" (max {staleness:.0f})"


def eval_line(status: Mapping[str, Any]) -> str:
    """`eval at step 40 | sampled 0.41 | greedy 0.55`."""
    parts = [f"eval at step {status.get('step', 0)}"]
    if env := status.get("env"):
        parts[0] += f" on {env}"
    for name in ("sampled", "greedy"):
        if (value := status.get(name)) is not None:
            parts.append(f"{name} {value:.3f}")
    return " | ".join(parts)


def time_left(arrivals: list[tuple[int, float]], max_steps: int) -> float | None:
    """Seconds to the last step at the speed of the latest steps; None before the second step."""
    if len(arrivals) < 2:
        return None
    (first_step, first_at), (last_step, last_at) = arrivals[0], arrivals[-1]
    if last_step <= first_step:
        return None
    return (max_steps - last_step) * (last_at - first_at) / (last_step - first_step)
