"""A verb in a process of its own: what it prints, how it is asked to stop, and how it ended.

States: RUNNING -> ENDED. A thread reads what the process prints; `follow` hands it on, in the thread that waits for the
process or in one of its own. The process is in a group of its own, so Ctrl-C reaches only this one, which passes it on.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from stretto.base.errors import ConfigError, EngineError
from stretto.base.process import EXIT_CONFIG, EXIT_INTERRUPTED
from stretto.base.status import STATUS_FD_VAR, harmless

_NUM_SAID = 30  # lines of an error that an exception has
_NUM_KEPT = 200  # lines that `tail` has
_TICK_S = 0.25
_MARKS = ("error: ", "FAILED")
"""Begin the lines that say why a verb failed."""


class Started:
    """A verb that runs, or has run."""

    def __init__(
        self, verb: str, words: Sequence[str], reword: Callable[[str], str] = str, *, has_status: bool = False
    ) -> None:
        """Start `stretto VERB WORDS`.

        reword: changes its error message into the terms of the caller. has_status: it has no console of its own, and
        is given a pipe for status lines (base/status.py), of which `part` is made.
        """
        self.verb, self._reword = verb, reword
        self.num_interrupts = 0
        self.part: tuple[str, int, int] | None = None
        """What it does now, how much of it is done, and of how much; total 0: not known."""
        self.tail: deque[str] = deque(maxlen=_NUM_KEPT)
        self._said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_read = threading.Event()
        self._following = threading.Lock()
        reader, writer = os.pipe() if has_status else (-1, -1)
        status = {STATUS_FD_VAR: str(writer)} if has_status else {}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it has started (child.py)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "stretto_python.child", verb, *words],
                stdin=subprocess.PIPE,  # its end tells the verb that this process is gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
                pass_fds=(writer,) if has_status else (),
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | status,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if has_status:
            os.close(writer)
            threading.Thread(target=self._read_status, args=(reader,), name=f"status {verb}", daemon=True).start()
        threading.Thread(target=self._read, name=f"stretto {verb}", daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def pid(self) -> int:
        return self._popen.pid

    def _read(self) -> None:
        assert self._popen.stdout is not None and self._popen.stdin is not None
        for line in self._popen.stdout:
            text = harmless(line).rstrip("\n")
            self.tail.append(text)
            if self._said or text.startswith(_MARKS):
                self._said = [*self._said[: _NUM_SAID - 1], text]
            self._lines.put(text)
        self._popen.wait()
        self._popen.stdin.close()
        self._popen.stdout.close()
        self._lines.put(None)
        self._is_read.set()

    def _read_status(self, reader: int) -> None:
        with os.fdopen(reader, errors="replace") as lines:
            for line in lines:
                fields = json.loads(line)
                text = harmless(str(fields.get("text", "")))
                if fields["kind"] in ("phase", "progress"):
                    self.part = (text, int(fields.get("done") or 0), int(fields.get("total") or 0))
                if fields["kind"] in ("phase", "note", "warning"):
                    self._lines.put(f"warning: {text}" if fields["kind"] == "warning" else text)

    def follow(self, show: Callable[[str], None], tick: Callable[[], object], until: float | None = None) -> bool:
        """Hand lines to `show` and call `tick` now and then, until the process has ended; whether it has.

        until: monotonic time at which to return all the same. A KeyboardInterrupt is passed on as a wish to stop.
        """
        with self._following:
            while until is None or time.monotonic() < until:
                try:
                    if self._hand_on(show, tick):
                        return True
                except KeyboardInterrupt:
                    self.interrupt()
        return self._is_read.is_set()

    def _hand_on(self, show: Callable[[str], None], tick: Callable[[], object]) -> bool:
        """Hand on one line, or none within a tick; whether there will be no more."""
        try:
            line = self._lines.get(timeout=_TICK_S)
        except queue.Empty:
            tick()
            return self._is_read.is_set()
        if line is not None:
            show(line)
            return False
        self._lines.put(None)
        tick()
        return True

    def join(self, until: float | None = None) -> bool:
        """Wait until all that the process has printed is read, while another thread follows it; as `follow`."""
        while not self._is_read.is_set() and (until is None or time.monotonic() < until):
            try:
                self._is_read.wait(_TICK_S)
            except KeyboardInterrupt:
                self.interrupt()
        return self._is_read.is_set()

    def interrupt(self) -> None:
        """What Ctrl-C does: finish the step and save a checkpoint; the second time, end at once."""
        self.num_interrupts += 1
        if self.is_running:
            self._popen.send_signal(signal.SIGINT)

    def check(self) -> None:
        """Raises: ConfigError or EngineError with the message of a verb that has failed; nothing if it was stopped."""
        code = self._popen.poll()
        if not code or (self.num_interrupts and code in (EXIT_INTERRUPTED, -signal.SIGINT)):
            return
        reason = self._reword("\n".join(self._said).strip().removeprefix("error: "))
        if code == EXIT_CONFIG:
            raise ConfigError(f"{self.verb}: {reason or 'the configuration is wrong; it said no more'}")
        last = "\n".join(list(self.tail)[-10:])
        raise EngineError(f"{self.verb} ended with status {code}: {reason or last}")
