"""The other process in a test of a wire: a script that is started, driven over pipes, and killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from processes import forked

WARNINGS_FAIL = "import warnings; warnings.simplefilter('error')\n"


class Peer:
    """A running script; `line` waits for its next line of output."""

    def __init__(self, code: str, *args: object) -> None:
        command = [sys.executable, "-c", WARNINGS_FAIL + code, *map(str, args)]
        self.process = forked.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        got = self.process.stdout.readline()
        if not got:
            raise AssertionError(f"the other process ended:\n{self.process.stderr.read()}")
        return got.strip()

    def write_line(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Wait for its end; its exit code must be 0."""
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors


@contextmanager
def peer(code: str, *args: object) -> Iterator[Peer]:
    """Run a script as a process, which is killed at the end of the test if it still runs."""
    started = Peer(code, *args)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()
        for pipe in (started.process.stdin, started.process.stdout, started.process.stderr):
            pipe.close()
