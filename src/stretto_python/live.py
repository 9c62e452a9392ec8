"""A run that this process has started: shown while it goes on, stopped, and waited for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from stretto.base.errors import StrettoError
from stretto.base.files import identity
from stretto.base.paths import RunDir
from stretto_python.progress import Display, Progress, is_notebook
from stretto_python.started import Started


class Live:
    """A process of a verb, and where it is shown: a notebook's display, this process's output, or nowhere."""

    def __init__(self, started: Started, run: RunDir, *, is_shown: bool = True, is_printed: bool = False) -> None:
        """is_printed: print its lines in a notebook, too, as a dry run's."""
        self.started = started
        self._config = identity(run.config("run"))  # None, or that of an earlier run of this name
        self.progress = Progress(run, is_own=True)
        self.progress.state = "running"
        self._display = Display(self.progress) if is_shown and not is_printed and is_notebook() else None
        self._is_printed = is_shown and self._display is None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self.started.is_running

    def begin(self) -> None:
        """Wait until the run has its directory, and go on showing it in the background, if that is a display.

        A KeyboardInterrupt stops it, and is waited for.

        Raises: ConfigError or EngineError if it has failed before.
        """
        run = self.progress.run
        try:
            while self.is_running and identity(run.config("run")) in (None, self._config):
                time.sleep(0.05)
        except KeyboardInterrupt:
            self.started.interrupt()
            self.wait()
        if not self.is_running:
            self.wait()
        elif self._display is not None:
            self._thread = threading.Thread(target=self._follow, name="stretto display", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process has ended; whether it has. A KeyboardInterrupt stops it, and the wait goes on.

        Raises: ConfigError or EngineError with the message of a verb that has failed.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self._thread is None:
            if not self._follow(until):
                return False
        elif not self.started.join(until):
            return False
        else:
            self._thread.join()
        self.started.check()
        return True

    def _follow(self, until: float | None = None) -> bool:
        show: Callable[[str], None] = print_line if self._is_printed else ignore
        display = self._display
        if display is not None:
            show = display.line
        has_ended = self.started.follow(show, ignore if display is None else self._tick, until)
        if has_ended and display is not None:
            self.progress.state = self._ending()
            self._tick()
        return has_ended

    def _tick(self) -> None:
        assert self._display is not None
        self.progress.part = self.started.part
        self._display.tick()

    def _ending(self) -> str:
        try:
            self.started.check()
        except StrettoError:
            return "failed"
        return "stopped" if self.started.num_interrupts else "done"


def print_line(text: str) -> None:
    """Print a line of a run at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def ignore(*_: object) -> None:
    """Show nothing."""
