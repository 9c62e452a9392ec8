"""The keeper: a helper process that cleans up after its parent, in whatever way the parent has ended.

The kernel kills a direct child together with its parent (process.py), but not the child's own children, and it leaves
their shared memory and temporary files. So a process that starts others also starts a keeper, which is this file run
as a program. It sleeps until its parent has ended, then kills the remaining descendants and removes what they left in
/dev/shm and in temporary directories.

Descendants are recognised by a mark in their environment, which they inherit even if they leave the process group. The
mark of a child is `<token>.<number>;`, appended to the marks of its ancestors.

The keeper removes the shared memory that remaining descendants use, and the shared memory that was reported to it. If a
single process is killed from outside before its shared memory was reported, that stays. If the keeper is killed, too,
as when a scheduler ends a node, the next keeper on the machine removes the directory and the reported shared memory. A
keeper that is killed alone is started again.

    STARTED (sleeps on the parent's pidfd) -> SWEEPING -> ended

Run as a script it can import only the standard library and files.py. Linux only.
"""

from __future__ import annotations

import getpass
import itertools
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    from files import SHARED_MEMORY, lock_within, remove_abandoned, remove_unowned  # type: ignore[import-not-found]
else:
    from stretto.base.files import SHARED_MEMORY, lock_within, remove_abandoned, remove_unowned

logger = logging.getLogger(__name__)

VARIABLE = "STRETTO_KEPT"
PREFIX = "stretto-"
# Names of shared memory of multiprocessing, torch, CUDA and vLLM. Our own files are locked by their owners (files.py).
_LIBRARY_NAMES = re.compile(r"psm_|sem\.mp-|torch_|cuda\.shm\.|vllm")
_DIRECTORY = re.compile(PREFIX + r"[0-9a-f]{8}$")
_NAMES = "shared_memory"  # file in the directory: the names that were reported
_SWEEP_S = 10.0  # a process that survives SIGKILL for longer hangs in the kernel
_POLL_S = 0.01
_MOST_RESTARTS = 10  # a keeper that ends at once is no use
_LONGEST_BASE = 107 - len("/stretto-01234567") - len("/01234567-89ab-cdef-0123-456789abcdef")
"""The longest path of a temporary directory that leaves room for vLLM's socket paths."""


# -- in the process that starts others --


class Keeper:
    """This process's keeper, seen from this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.token = os.urandom(4).hex()
        self._numbers = itertools.count(1)
        self.directory: Path | None = None
        """Temporary directory of all descendants, removed with them; None if an ancestor has made one, or if its path
        would be too long for sockets."""
        locks = []
        base = tempfile.gettempdir()
        if not _DIRECTORY.search(base) and len(base) <= _LONGEST_BASE:
            remove_stale()
            self.directory, lock = _make_directory(self.token)
            locks.append(lock)
        self._reported: list[bytes] = []
        self._pipe, self._restarts = -1, 0
        self._start(locks)

    def _start(self, locks: list[int]) -> None:
        """Start the keeper, with the descriptors of its locks, and watch it."""
        reports, pipe = os.pipe()
        os.set_blocking(pipe, False)
        command = [sys.executable, "-I", "-S", __file__, str(self.pid), self.token, str(self.directory or "")]
        self._popen = subprocess.Popen(
            command,
            env={},  # no mark: it must outlive the processes that it kills
            stdin=reports,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=locks,  # the keeper holds the lock as long as it lives
        )
        # Nobody waits for it, since it outlives this process; a returncode prevents Popen's warning about that.
        self._popen.returncode = 0
        for fd in (reports, *locks):
            os.close(fd)
        self._pipe, before = pipe, self._pipe
        if before >= 0:
            os.close(before)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(pipe, b"".join(self._reported))
        threading.Thread(target=self._watch, args=(self._popen.pid,), name="keeper", daemon=True).start()

    def _watch(self, pid: int) -> None:
        """Start the keeper again if it is killed: without one, whatever this process started would outlive it."""
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        if os.getpid() != self.pid or sys.is_finalizing():
            return
        if self._restarts == _MOST_RESTARTS:
            logger.error("the keeper of this process was killed %d times, and is not started again", self._restarts)
            return
        self._restarts += 1
        logger.warning("the keeper of this process (pid %d) was killed, and is started again", pid)
        locks = []
        if self.directory is not None:
            with suppress(OSError):
                locks = [os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)]
                lock_within(locks[0], _SWEEP_S)
        try:
            self._start(locks)
        except OSError as error:
            logger.error("there is no keeper: %s; kill -9 of this process would leave what it started", error)

    def mark(self) -> str:
        """A new mark, for one more child."""
        return f"{self.token}.{next(self._numbers)};"

    def report_shared_memory(self, names: Iterable[str]) -> None:
        """Tell the keeper which shared memory to remove at the end, even if no process uses it then."""
        lines = b"".join(os.fsencode(name) + b"\n" for name in names)
        if not lines:
            return
        self._reported.append(lines)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, lines)
        directory = self.directory or Path(tempfile.gettempdir())  # an ancestor's
        if _DIRECTORY.search(directory.name):
            with suppress(OSError), open(directory / _NAMES, "ab") as file:
                file.write(lines)

    def env(self, mark: str) -> dict[str, str]:
        """Environment variables for a child with this mark."""
        # SPT_NOENV: process titles would otherwise overwrite the environment block that holds the marks.
        env = {VARIABLE: os.environ.get(VARIABLE, "") + mark, "SPT_NOENV": "1"}
        if self.directory is not None:
            env |= {"TMPDIR": str(self.directory)} | persistent_caches()
        return env


_keeper: Keeper | None = None


def start() -> Keeper:
    """This process's keeper; the first call starts it."""
    global _keeper
    if _keeper is None or _keeper.pid != os.getpid():
        _keeper = Keeper()
    return _keeper


class Descendants:
    """All processes that this process starts, also from third-party code; they end with it."""

    def __init__(self) -> None:
        self._keeper = start()
        self._mark = self._keeper.mark()
        self._shared: set[str] = set()
        os.environ.update(self._keeper.env(self._mark))
        tempfile.tempdir = None

    def record_shared_memory(self) -> None:
        """Record the shared memory in use now; it is removed even if its users end before `kill`."""
        found = removable_shared_memory([os.getpid(), *marked_processes(self._mark)])
        self._keeper.report_shared_memory(found - self._shared)
        self._shared |= found

    def kill(self) -> None:
        """Kill the remaining descendants and remove their shared memory."""
        kill_marked(self._mark, self._shared)


def _make_directory(token: str) -> tuple[Path, int]:
    """Make a temporary directory and lock it.

    Other users may traverse it, because a sandboxed program must.
    """
    directory = Path(tempfile.gettempdir()) / f"{PREFIX}{token}"
    # Until it is locked, another keeper would remove it as stale.
    hidden = directory.with_name(f".{directory.name}")
    hidden.mkdir(mode=0o711)
    hidden.chmod(0o711)
    lock = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC)
    lock_within(lock, _SWEEP_S)
    return hidden.rename(directory), lock


def persistent_caches() -> dict[str, str]:
    """Environment variables that keep caches out of the run's temporary directory.

    PyTorch always puts precompiled headers for CPU kernels into the temporary directory: they would be compiled in each
    run, while the kernels that include them are cached. So headers are not precompiled. openai_harmony puts the
    vocabulary that it downloads there, and makes the directory even if nothing can be downloaded.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{user}"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TIKTOKEN_RS_CACHE_DIR": str(Path(tempfile.gettempdir()) / "tiktoken-rs-cache"),
    }
    return {name: value for name, value in variables.items() if name not in os.environ}


def remove_stale() -> int:
    """Remove the temporary directories of keepers that were killed; returns their number."""
    paths = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    num_removed: int = remove_abandoned((path for path in paths if _DIRECTORY.search(path.name)), _remove_directory)
    return num_removed


def _remove_directory(directory: Path) -> None:
    """Remove the directory of a keeper that was killed, and the shared memory that was reported to it."""
    with suppress(OSError):
        remove_shared(_names((directory / _NAMES).read_bytes()))
    shutil.rmtree(directory, ignore_errors=True)


# -- on both sides --


def marked_processes(mark: str) -> list[int]:
    """Pids of the processes with this mark and of their descendants, except this process and keepers."""
    parents, marked, mark_bytes = {}, set(), mark.encode()
    for pid in _pids():
        with suppress(OSError, IndexError):
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[pid] = int(parent)
                if mark_bytes in _marks(pid):
                    marked.add(pid)
    descendants = [pid for pid in parents if _is_below(pid, marked, parents)]
    return [pid for pid in descendants if pid != os.getpid() and not _is_keeper(pid)]


def removable_shared_memory(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes use and that belong to libraries, which do not clean up."""
    return {name for name in shared_memory_of(pids) if _LIBRARY_NAMES.match(name)}


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped.

    Compared by inode: a semaphore's creator maps it under a temporary name and renames it afterwards.
    """
    inodes = {inode for pid in pids for inode in _mapped(pid)}
    return {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes} if inodes else set()


def kill_marked(mark: str, names: Iterable[str] = ()) -> list[int]:
    """Kill all processes with this mark and remove their shared memory; returns the pids that do not die.

    names: shared memory of processes that have already ended, which is removed, too.
    """
    shared, deadline = set(names), time.monotonic() + _SWEEP_S
    while (alive := marked_processes(mark)) and time.monotonic() < deadline:
        shared |= removable_shared_memory(alive)
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    remove_shared(shared)
    remove_unowned(SHARED_MEMORY)
    return alive


def remove_shared(names: Iterable[str]) -> None:
    """Remove these entries of /dev/shm, except those that a process still uses."""
    if owned := {name for name in names if _is_owned(SHARED_MEMORY / name)}:
        for name in owned - removable_shared_memory(_pids()):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def _is_owned(path: Path) -> bool:
    """Whether the file exists and belongs to this user."""
    with suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _marks(pid: int) -> bytes:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(VARIABLE.encode() + b"="):
            return entry
    return b""


def _is_below(pid: int, marked: set[int], parents: dict[int, int]) -> bool:
    """Whether the process or one of its ancestors is marked."""
    current: int | None = pid
    while current is not None and current not in marked:
        current = parents.get(current)
    return current is not None


def _is_keeper(pid: int) -> bool:
    with suppress(OSError):
        return __file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _mapped(pid: int) -> set[int]:
    """Inodes in /dev/shm that the process has mapped."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        return {int(line.split(maxsplit=5)[4]) for line in lines if b" /dev/shm/" in line}
    return set()


# -- the keeper --


def main() -> None:
    """Wait until the parent has ended, then clean up after it."""
    parent, token, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends only after its parent has ended
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:  # otherwise the parent has ended, and its pid may be another process's
            select.select([pidfd], [], [])
    kill_marked(f"{token}.", _read_reported_names())
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _read_reported_names() -> list[str]:
    """Names of shared memory that the parent reported.

    It does not wait for the end of the pipe, which another process may hold open.
    """
    os.set_blocking(0, False)
    data = bytearray()
    with suppress(BlockingIOError):
        while chunk := os.read(0, 65536):
            data += chunk
    return _names(bytes(data))


def _names(lines: bytes) -> list[str]:
    return [os.fsdecode(line) for line in lines.split(b"\n")[:-1]]


if __name__ == "__main__":
    main()
