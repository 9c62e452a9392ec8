"""What a session of tests leaves behind: processes, shared memory, temporary files; and nothing of others.

Processes carry a mark in their environment (base/keeper.py). Temporary files are in a directory of the session. Which
shared memory the session's processes have open is looked at while some is new, and every ten seconds besides: reading
what all processes have mapped takes long.

A plugin of pytest: the process that begins the session looks after what it leaves behind, xdist's workers included.
"""

from __future__ import annotations

import itertools
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from stretto.base import keeper

LOOK_EVERY_S = 1.0
NUM_LOOKS_IF_NEW = 2  # it may be mapped a moment after it was made
NUM_LOOKS_AT_NAMES = 10  # after so many, processes are looked at in any case
ENDING_S = 5.0  # what is about to end may do so
SESSION = pytest.StashKey["Session"]()
_PYTHONS_OWN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and sys.platform == "linux":
        config.stash[SESSION] = Session()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if SESSION in session.config.stash and (left := session.config.stash[SESSION].end()):
        report = session.config.get_terminal_writer()
        report.line()
        report.line("the tests have left behind:\n  " + "\n  ".join(left), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class Session:
    """From the first test to the last, in the process that begins the session."""

    def __init__(self) -> None:
        os.environ.update(keeper.persistent_caches())
        # pytest's own directories, of which those of failed tests shall stay.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self.mark = f"tests{os.urandom(4).hex()}.1;"
        self.directory = Path(tempfile.mkdtemp(prefix="t"))
        self.directory.chmod(0o711)
        os.environ[keeper.VARIABLE] = os.environ.get(keeper.VARIABLE, "") + self.mark
        os.environ["TMPDIR"] = str(self.directory)
        tempfile.tempdir = None
        self._shared: set[str] = set()
        self._strange: dict[tuple[str, int], int] = {}  # looks at what may be another's, by name and inode
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._look_on, name="leftovers", daemon=True)
        self._looking.start()

    def end(self) -> list[str]:
        """What is left, in words; it is removed."""
        self._is_over.set()
        self._looking.join()
        self._look()
        multiprocessing.util._run_finalizers()  # as at the end of this process: its directory of sockets goes
        deadline = time.monotonic() + ENDING_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        keeper.kill_marked(self.mark)
        for name in self._shared:
            (keeper.SHARED_MEMORY / name).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        return left

    def _look_on(self) -> None:
        for number in itertools.count():
            if self._is_over.wait(LOOK_EVERY_S):
                return
            if self._has_new() or number % NUM_LOOKS_AT_NAMES == 0:
                self._look()

    def _has_new(self) -> bool:
        """Is there shared memory that may be the session's, and was not there at the last looks?"""
        with os.scandir(keeper.SHARED_MEMORY) as entries:
            there = [(entry.name, entry.inode()) for entry in entries]
        self._strange = {key: self._strange.get(key, 0) + 1 for key in there if key[0] not in self._shared}
        return any(looks <= NUM_LOOKS_IF_NEW for looks in self._strange.values())

    def _look(self) -> None:
        for pid in (os.getpid(), *keeper.marked_processes(self.mark)):
            self._shared |= keeper.shared_memory_of([pid]) | _open_in_shared_memory(pid)

    def _left(self) -> list[str]:
        processes = [f"process {pid}: {words}" for pid in keeper.marked_processes(self.mark) if (words := _words(pid))]
        # CUDA's own goes with a process that returns from main, which xdist's workers and forked ones do not.
        names = sorted(name for name in self._shared if not name.startswith("cuda.shm."))
        shared = [f"{keeper.SHARED_MEMORY}/{name}" for name in names if (keeper.SHARED_MEMORY / name).exists()]
        own = keeper._keeper and keeper._keeper.directory  # goes with this process
        files = [str(path) for path in sorted(self.directory.iterdir()) if path != own]
        return processes + shared + files


def _open_in_shared_memory(pid: int) -> set[str]:
    prefix, found = f"{keeper.SHARED_MEMORY}/", set()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                if path.startswith(prefix):
                    found.add(path.removeprefix(prefix))
    # pytest's directories may be in memory too; those of failed tests stay.
    return {name for name in found if name and not name.startswith("pytest-of-") and not name.endswith(" (deleted)")}


def _words(pid: int) -> str:
    """Its command line; empty for one that has ended, and for Python's own helpers of this process."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        return "" if any(own in words for own in _PYTHONS_OWN) else words.decode(errors="replace")[:200]
    return ""
