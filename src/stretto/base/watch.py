"""Stall watchdog: a process that makes no progress dumps its state and ends, instead of occupying machines for ever.

Work that may be slow without being stuck, like the import of a user's module, is only logged (`warn_when_slow`).

States: WATCHING -> CLOSED (by its owner) or STALLED (no progress for stall_timeout_s; the process ends with exit
code 70). Code that completes something calls `progress(what)`; a thread checks how long ago that was. The time counts
from the first call: before it, waits for other processes have deadlines of their own. Native code that never releases
the interpreter lock is detected too, from the beginning: faulthandler's own thread ends the process with exit code 1 if
the watching thread cannot run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

logger = logging.getLogger(__name__)

EXIT_STALLED = 70
SLOW_S = 5.0


class WatchState(StrEnum):
    WATCHING = "watching"
    CLOSED = "closed"
    STALLED = "stalled"


class Watch:
    """Ends the process, after dumping stacks and gauges, if it makes no progress.

    gauges: returns what to dump, such as queue depths; called from another thread, so it must only read counters.
    on_stall: ends the process; tests pass their own.
    """

    def __init__(
        self,
        stall_timeout_s: float,
        dump_dir: Path,
        gauges: Callable[[], dict[str, Any]] = dict,
        *,
        role: str = "process",
        on_stall: Callable[[int], None] = os._exit,
    ) -> None:
        assert stall_timeout_s > 0, f"stall_timeout_s = {stall_timeout_s}"
        self.stall_timeout_s = stall_timeout_s
        self.dump_dir = Path(dump_dir)
        self.role = role
        self.state = WatchState.WATCHING
        self._gauges = gauges
        self._on_stall = on_stall
        self._last: tuple[str, float] | None = None  # what was completed last, and when
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def progress(self, what: str) -> None:
        """Record that something was completed. Cheap: call it as often as you like."""
        self._last = (what, time.monotonic())

    def __enter__(self) -> Watch:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        if self.state is WatchState.WATCHING:
            self.state = WatchState.CLOSED

    def _run(self) -> None:
        tick_s = min(5.0, self.stall_timeout_s / 10)
        try:
            while not self._closing.wait(tick_s):
                # Restarted at every tick: it fires only if this thread itself cannot run for that long.
                faulthandler.dump_traceback_later(self.stall_timeout_s + 2 * tick_s, file=2, exit=True)
                if self._last is None:
                    continue
                what, at = self._last
                silent_s = time.monotonic() - at
                if silent_s >= self.stall_timeout_s:
                    return self._stall(what, silent_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _stall(self, what: str, silent_s: float) -> None:
        self.state = WatchState.STALLED
        path = self.dump_dir / f"{self.role}_{os.getpid()}.txt"
        logger.error(
            "stalled: nothing moved for %.0fs (last: %s; stall_timeout_s %g); stacks, queue depths: %s",
            silent_s,
            what,
            self.stall_timeout_s,
            path,
        )
        try:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                self._dump(file, what, silent_s)
        finally:
            logging.shutdown()
            sys.stderr.flush()
            self._on_stall(EXIT_STALLED)

    def _dump(self, file: TextIO, what: str, silent_s: float) -> None:
        file.write(
            f"{self.role} (pid {os.getpid()}): nothing moved for {silent_s:.0f}s; last: {what}\n\n== threads ==\n"
        )
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        if self._loop is not None:
            file.write("\n== asyncio tasks ==\n")
            for task in asyncio.all_tasks(self._loop):
                file.write(f"\n{task.get_name()}:\n")
                file.writelines(traceback.StackSummary.extract(_awaiting(task)).format())
        file.flush()
        # Last, because it calls other code: if a gauge fails, only the gauges are missing.
        file.write("\n== gauges ==\n")
        try:
            gauges = json.dumps(self._gauges(), indent=2, default=str)
        except Exception as error:  # the process ends anyway, and the dump must be written
            gauges = f"not available: {type(error).__name__}: {error}"
        file.write(gauges + "\n")


def _awaiting(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    """All frames of a suspended task, down to the one that waits; `Task.print_stack` shows only the outermost."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


@contextmanager
def warn_when_slow(what: str) -> Iterator[None]:
    """Log a warning with file and line if the block takes longer than SLOW_S.

    The warning is repeated each time the waiting time has doubled.
    """
    is_done, thread, started_at = threading.Event(), threading.get_ident(), time.monotonic()

    def warn() -> None:
        warn_at = started_at + SLOW_S
        while not is_done.wait(max(0.0, warn_at - time.monotonic())):
            waited_s = time.monotonic() - started_at
            logger.warning("%s: not done after %.0f s; it is at %s", what, waited_s, _location_of(thread))
            warn_at = started_at + 2 * waited_s

    threading.Thread(target=warn, name="warn_when_slow", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _location_of(thread: int) -> str:
    """`file:line` where a thread is, ignoring Python's import machinery."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen"):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
