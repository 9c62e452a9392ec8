"""One copy of a run's weights on each engine host, to which changes are applied and from which engines load.

A file in memory (tmpfs), shared by all workers of all engines on the host, so that it is held once however many
there are. It begins with the version it holds, which is cleared before it is changed and set when all of it has
been verified. Three locks, which the kernel drops when a process dies:

    NAME.users  shared for life         the last process that leaves removes the files; a start removes dead ones
    NAME.lock   exclusive while writing one process brings the copy to a version, the others wait
    NAME        shared while loading    a writer waits for those that still load the version before

A writer that waits in vain makes a new file and leaves the old one to its readers.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from stretto.base.errors import EngineError, WireError
from stretto.transports.weights.layout import HEAD_BYTES, HEAD_MAGIC, shard_head

PREFIX = "stretto-copy-"
READERS_S = 10.0
"""How long a writer waits for those that load the version before."""
WRITER_S = 600.0
"""How long a reader waits for the one that writes."""
_GLANCE_S = 0.05
_POLL_S = 0.005


class HostCopy:
    """This process's hold on the copy of one chain of versions; `num_bytes` of tensors."""

    def __init__(self, directory: Path, name: str, num_bytes: int) -> None:
        if not directory.is_dir():
            raise EngineError(f"weight_broadcast.delta.directory = {directory} does not exist on this host")
        remove_stale(directory)
        self._data = directory / f"{PREFIX}{name}"
        self._users, self._lock = self._data.with_suffix(".users"), self._data.with_suffix(".lock")
        self._num_bytes = num_bytes
        self._users_fd = _open_locked(self._users, fcntl.LOCK_SH)

    @property
    def version(self) -> int | None:
        """What it holds; None: nothing, or something unfinished."""
        with contextlib.suppress(FileNotFoundError), self._data.open("rb") as file:
            return version_of(file.read(HEAD_BYTES))
        return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer | None]:
        """The right to change it, for one process at a time; None when another has it."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not _lock_in(lock, fcntl.LOCK_EX, _GLANCE_S):  # a reader may look whether somebody writes
                yield None
                return
            fd = self._open_for_writing()
            try:
                yield Writer(fd)
            finally:
                _unlock(fd)
        finally:
            os.close(lock)

    def read(self, version: int) -> Snapshot:
        """The copy at this version, which does not change until it is closed.

        Raises: WireError when it holds another version once nobody writes any more.
        """
        if self.version != version:
            self._wait_for_writer()
        try:
            fd = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise WireError(f"{self._data} does not exist.") from None
        try:
            _await_lock(fd, fcntl.LOCK_SH, WRITER_S, f"{self._data} to be written")
            held = version_of(os.pread(fd, HEAD_BYTES, 0))
            if held != version:
                what = "nothing that is finished" if held is None else f"version {held}"
                raise WireError(f"{self._data} holds {what}, not version {version}.")
            return Snapshot(fd)
        except BaseException:
            _unlock(fd)
            raise

    def close(self) -> None:
        """Leave; the last one removes the files."""
        if self._users_fd < 0:
            return
        if _try_lock(self._users_fd, fcntl.LOCK_EX):
            for path in (self._data, self._lock, self._users):
                path.unlink(missing_ok=True)
        os.close(self._users_fd)
        self._users_fd = -1

    def _wait_for_writer(self) -> None:
        """Return when nobody has the right to write."""
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                _await_lock(lock, fcntl.LOCK_SH, WRITER_S, f"another process to write {self._data}")
            finally:
                os.close(lock)

    def _open_for_writing(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._data, flags, 0o600)
        if not _lock_in(fd, fcntl.LOCK_EX, READERS_S):
            os.close(fd)
            self._data.unlink()
            fd = os.open(self._data, flags | os.O_EXCL, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            size = HEAD_BYTES + self._num_bytes
            # All of it now: a page that a full tmpfs cannot give later would be a SIGBUS.
            os.posix_fallocate(fd, 0, size)
            os.ftruncate(fd, size)
        except OSError as cause:
            os.ftruncate(fd, 0)
            os.close(fd)
            raise EngineError(
                f"a copy of the weights in {self._data}, {size} bytes: {cause.strerror}; make room there (docker: "
                "--shm-size) or name another weight_broadcast.delta.directory."
            ) from cause
        return fd


class Writer:
    """The copy, being changed: `tensors` are its bytes. Not finished: it holds nothing."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0)
        self.tensors = np.frombuffer(self._map, np.uint8)[HEAD_BYTES:]

    @property
    def version(self) -> int | None:
        return version_of(self._map[:HEAD_BYTES])

    def begin(self) -> None:
        self._map[:HEAD_BYTES] = bytes(HEAD_BYTES)

    def finish(self, version: int) -> None:
        self._map[:HEAD_BYTES] = shard_head(version)


class Snapshot:
    """The copy at one version, as private memory over its pages; `with` it, or close it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Private: writable, as torch wants its memory, while the others' bytes stay as they are.
        self.map = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Let writers in. The mapping ends with the last tensor that refers to it."""
        if self._fd >= 0:
            _unlock(self._fd)
            self._fd = -1

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- the copies of this process --

_held: dict[str, tuple[str, HostCopy]] = {}
_held_lock = threading.Lock()


def copy_of(directory: Path, run: str, chain: str, num_bytes: int) -> HostCopy:
    """The copy of a run's chain; an older chain of the same run, of a trainer that has gone, is left."""
    with _held_lock:
        held = _held.get(run)
        if held is None or held[0] != chain:
            if held is not None:
                held[1].close()
            name = re.sub(r"[^A-Za-z0-9_]+", "_", run)[:64] + "-" + chain
            _held[run] = (chain, HostCopy(directory, name, num_bytes))
        return _held[run][1]


@atexit.register
def forget() -> None:
    """Leave all copies: at the end of a process, and in tests."""
    with _held_lock:
        for _, copy in _held.values():
            copy.close()
        _held.clear()


def remove_stale(directory: Path) -> int:
    """Remove the copies of processes that are dead; how many there were."""
    removed = 0
    for users in directory.glob(PREFIX + "*.users"):
        try:
            fd = os.open(users, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            if _try_lock(fd, fcntl.LOCK_EX):
                for path in (users.with_suffix(""), users.with_suffix(".lock"), users):
                    path.unlink(missing_ok=True)
                removed += 1
        finally:
            os.close(fd)
    return removed


def version_of(head: bytes) -> int | None:
    """What a file that begins so holds."""
    is_finished = head[:8] == HEAD_MAGIC
    return int.from_bytes(head[8:16], "little") if is_finished else None


def _open_locked(path: Path, kind: int) -> int:
    """A file, locked. A cleaner may remove it between the two: then it is made again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, kind)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int) -> None:
    """Close it, and its lock at once: a mapping has a descriptor of its own, which would keep the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _lock_in(fd: int, kind: int, timeout_s: float) -> bool:
    """Whether it was locked in time."""
    deadline = time.monotonic() + timeout_s
    while not _try_lock(fd, kind):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _await_lock(fd: int, kind: int, timeout_s: float, what: str) -> None:
    if not _lock_in(fd, kind, timeout_s):
        raise WireError(f"waited {timeout_s:g} s for {what}.")
