"""Status lines for the console: one JSON object per line on a pipe from a run's processes to the launcher.

`report(kind, **fields)` is the writing end; `launch/run/console.py` reads and renders. The pipe's file
descriptor is in the environment variable STRETTO_STATUS_FD; a process that was started alone has none and logs the
same instead: a text as it is, numbers as that line, progress every LOGGED_EVERY_S. Fields that are missing or None are
not shown. The first report that is neither a note nor early tells the launcher that the process handles SIGINT and has
work to finish: install signal handlers before it.

    phase    text, is_early                what the run does until the first step ("waiting for the engine"); early:
                                           no rollout has started yet, so nothing is lost if the run ends. At the first
                                           one, config, data and the user's code have been checked: the launcher starts
                                           the other processes
    note     text                          a line that stays visible ("resumed from step 40: 37 rollouts reused")
    step     step, max_steps, time_s       one trained step
             reward, loss, mismatch_kl     means over the batch; mismatch_kl in nats
             entropy, length, truncated    nats per token; tokens per reply; share of replies that were cut
             staleness, staleness_max      versions between sampling and training, mean and max
             tokens_per_s                  trained tokens over wall time
             budget, budget_step           the part of the budget that is used, 0..1; the step with which it would end
             waits                         {process: fraction of the step, 0..1, in which it was idle}
    progress text, done, total             how far a part is: an eval, a checkpoint, a download; it ends when
                                           done = total
    warning  role, text                    a warning of any process (base/log.py), once per kind
    engine   url, state, reason            an engine that is "down"; the launcher restarts it
    eval     step, sampled, greedy, env    mean reward on held-out tasks
    ready    is_early                      a trainer rank whose first version is published
    summary  the fields of summary.json
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STATUS_FD_VAR = "STRETTO_STATUS_FD"
SUPERVISED_VAR = "STRETTO_SUPERVISED"
"""Set for children of a launcher, which sends SIGINT for an orderly end and SIGTERM for a quick one."""
FINISH_VAR = "STRETTO_FINISH"
"""Set in a job: a file that exists once the job has been asked to finish, perhaps before a process handled signals."""
DEVICES_FREE = "devices_free"
"""Kind of a status line of the orchestrator: engines sleep, so processes that wait for their devices can start."""
GO_FD_VAR = "STRETTO_GO_FD"
"""Set for a process that is started before the orchestrator has checked everything, so that it can import meanwhile:
a pipe that ends when it may go on."""
KINDS = frozenset({"phase", "note", "step", "eval", "summary", "engine", "warning", "ready", "progress", DEVICES_FREE})

FIRST_SHOWN_S, SHOWN_EVERY_S = 1.0, 0.5
"""When progress is first reported, and how often after that; shorter work reports none."""
LOGGED_EVERY_S = 30.0
"""How often progress is logged without a launcher."""

_pipe: int | None = None
_logged: dict[str, float] = {}
"""By the text of a progress: when it was last logged, or first reported; of a monotonic clock."""


def is_supervised() -> bool:
    """Whether a launcher has started this process."""
    return bool(os.environ.get(SUPERVISED_VAR))


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask to finish the step and save.

    Without a launcher these include SIGTERM, which preemption sends, and SIGUSR2, which our jobs send.
    """
    if is_supervised():
        return (signal.SIGINT,)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


def was_asked_to_finish() -> bool:
    """Whether our job was asked to finish, perhaps before this process handled signals."""
    marker = os.environ.get(FINISH_VAR)
    return marker is not None and os.path.exists(marker)


def wait_for_go() -> None:
    """Wait until the launcher has seen that everything is checked, if this process was started before.

    Call it when all is imported and nothing of the run was touched.
    """
    if (fd := os.environ.pop(GO_FD_VAR, None)) is not None:
        os.read(int(fd), 1)
        os.close(int(fd))


def adopt_pipe() -> bool:
    """Take the pipe out of the environment, so that children do not write to it.

    Returns whether there is one.
    """
    global _pipe
    if (fd := os.environ.pop(STATUS_FD_VAR, None)) is not None:
        _pipe = int(fd)
        os.set_inheritable(_pipe, False)
    return _pipe is not None


def report(kind: str, **fields: Any) -> None:
    """Send one status line to the launcher; never blocks and never fails.

    The line is dropped if the pipe is full or the launcher has ended: the ledger and the metrics files hold the
    same facts.
    """
    assert kind in KINDS, f"unknown status kind {kind!r}"
    line = json.dumps({"kind": kind, **fields}, default=_plain)
    fd = _pipe if _pipe is not None else os.environ.get(STATUS_FD_VAR)
    if fd is None:
        _log(kind, line, **fields)
        return
    try:
        os.set_blocking(int(fd), False)
        os.write(int(fd), line.encode() + b"\n")
    except OSError as error:
        logger.debug("status line dropped: %s", error)


def _log(kind: str, line: str, *, text: str = "", done: int = 0, total: int = 0, **fields: Any) -> None:
    """Log a status line of a process without a launcher; a warning has been logged before it is reported."""
    if kind == "progress":
        now = time.monotonic()
        if done >= total:
            _logged.pop(text, None)
        elif now - _logged.setdefault(text, now) >= LOGGED_EVERY_S:
            _logged[text] = now
            logger.info("%s: %d of %d", text, done, total)
    elif kind in ("phase", "note"):
        logger.info("%s", text)
    elif kind != "warning":
        logger.info("%s", line)


@contextmanager
def growing(text: str, total_bytes: float, count: Callable[[], float]) -> Iterator[None]:
    """Report the progress of something that is written to a disk, in megabytes, if it takes longer than FIRST_SHOWN_S.

    count: returns the bytes written so far; called in a thread.
    """
    has_ended, total = threading.Event(), max(round(total_bytes / 1e6), 1)

    def follow() -> None:
        wait_s, is_shown = FIRST_SHOWN_S, False
        while not has_ended.wait(wait_s):
            wait_s, is_shown = SHOWN_EVERY_S, True
            # Less than the total, which would end the progress: that is reported below, after the end.
            report("progress", text=text, done=min(int(count() / 1e6), total - 1), total=total)
        if is_shown:
            report("progress", text=text, done=total, total=total)

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def bytes_below(directory: Path) -> int:
    """Bytes of the files in a directory, some of which may vanish meanwhile; 0 if the directory does not exist."""
    total = 0
    for path in directory.glob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _plain(value: Any) -> Any:
    """JSON form of other objects: numpy scalars as numbers, everything else as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


# -- how numbers and texts are written --

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with a space for each control character, so that it cannot change the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def harmless(text: str) -> str:
    """The text with its line breaks and tabs, and every other control character written out, such as `\\x1b`.

    For what models, environments and users have written: escape sequences clear the terminal, set its title, write the
    clipboard. Marks that turn the direction of the text are written out too.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def quantity(value: float) -> str:
    """`873`, `4.2k`, `21k`, `1.3M`."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            short = value / scale
            return f"{short:.0f}{unit}" if short >= 9.95 else f"{short:.1f}{unit}"
    return f"{value:.0f}"
