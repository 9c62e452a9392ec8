"""One copy of a run's weights on each engine host, to which changes are applied and from which engines load.

It is a file in memory (tmpfs), shared by all workers of all engines on the host. It begins with its version, which is
cleared before the copy is changed and set when all of it has been verified. There are three locks, which the kernel
releases when a process dies:

    NAME.users  shared, while a process lives   the last process removes the files; new ones remove those of dead runs
    NAME.lock   exclusive, while writing        one process updates the copy, the others wait
    NAME        shared, while loading           a writer waits for processes that still load the previous version

A writer that has waited for READERS_S makes a new file and leaves the old one to its readers.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from stretto.base.errors import EngineError, WireError
from stretto.base.files import COPY, lock_within, open_locked, remove_unowned, unlock
from stretto.transports.weights.layout import HEAD_BYTES, shard_head, version_of

READERS_S = 10.0
"""Longest wait of a writer for processes that load the previous version."""
WRITER_S = 600.0
"""Longest wait of a reader for a writer."""
_LOCK_TRY_S = 0.05


class HostCopy:
    """This process's access to the copy of one chain of versions; num_bytes: size of all tensors."""

    def __init__(self, directory: Path, name: str, num_bytes: int) -> None:
        if not directory.is_dir():
            raise EngineError(f"weight_broadcast.delta.directory = {directory} does not exist on this host")
        remove_unowned(directory)
        self._data = directory / f"{COPY}{name}"
        self._users, self._lock = self._data.with_suffix(".users"), self._data.with_suffix(".lock")
        self._num_bytes = num_bytes
        self._users_fd = open_locked(self._users, is_shared=True)

    @property
    def version(self) -> int | None:
        """The version of the copy; None if there is none, or it is incomplete."""
        with contextlib.suppress(FileNotFoundError), self._data.open("rb") as file:
            return version_of(file.read(HEAD_BYTES))
        return None

    @contextlib.contextmanager
    def writing(self, unless: int | None = None) -> Iterator[CopyWriter | None]:
        """Exclusive write lock on the copy; yields None if another process holds it.

        unless: also None if the copy is at this version already.
        """
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Not 0 seconds: a reader locks it for a moment, to wait for a writer.
            if not lock_within(lock, _LOCK_TRY_S) or (unless is not None and self.version == unless):
                yield None
                return
            fd = self._open_for_writing()
            try:
                yield CopyWriter(fd)
            finally:
                unlock(fd)
        finally:
            os.close(lock)

    def read(self, version: int) -> CopyReader:
        """Open the copy at this version; it does not change until the reader is closed.

        Waits for a writer.

        Raises: WireError if the copy holds another version then.
        """
        if self.version != version:
            self._wait_for_writer()
        try:
            fd = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise WireError(f"{self._data} does not exist.") from None
        try:
            _await_writer(fd, f"{self._data} to be written")
            held = version_of(os.pread(fd, HEAD_BYTES, 0))
            if held != version:
                what = "no complete version" if held is None else f"version {held}"
                raise WireError(f"{self._data} holds {what}, not version {version}.")
            return CopyReader(fd)
        except BaseException:
            unlock(fd)
            raise

    def close(self) -> None:
        """End this process's access; the last process removes the files."""
        if self._users_fd >= 0:
            unlock(self._users_fd)
            self._users_fd = -1
            remove_unowned(self._users.parent)

    def _wait_for_writer(self) -> None:
        """Wait until no process writes."""
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                _await_writer(lock, f"another process to write {self._data}")
            finally:
                os.close(lock)

    def _open_for_writing(self) -> int:
        fd = os.open(self._data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not lock_within(fd, READERS_S):
            os.close(fd)
            self._data.unlink()
            fd = open_locked(self._data, is_new=True)
        try:
            size = HEAD_BYTES + self._num_bytes
            # Allocate all of it now: if the tmpfs is full later, writing to a new page would be a SIGBUS.
            os.posix_fallocate(fd, 0, size)
            os.ftruncate(fd, size)
        except OSError as cause:
            os.ftruncate(fd, 0)
            os.close(fd)
            raise EngineError(
                f"cannot write a copy of the weights to {self._data}, {size} bytes: {cause.strerror}; make room there "
                "(docker: --shm-size) or set another weight_broadcast.delta.directory."
            ) from cause
        return fd


class CopyWriter:
    """The copy while it is written; it has no version between `begin` and `commit`."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0)
        self.tensors = np.frombuffer(self._map, np.uint8)[HEAD_BYTES:]

    @property
    def version(self) -> int | None:
        return version_of(self._map[:HEAD_BYTES])

    def begin(self) -> None:
        self._map[:HEAD_BYTES] = bytes(HEAD_BYTES)

    def commit(self, version: int) -> None:
        self._map[:HEAD_BYTES] = shard_head(version)


class CopyReader:
    """The copy at one version, mapped as private memory, until it is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Private: writable, as torch requires, without changing the bytes that others see.
        self.map = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Allow writers again. The mapping ends with the last tensor that refers to it."""
        if self._fd >= 0:
            unlock(self._fd)
            self._fd = -1

    def __enter__(self) -> CopyReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- the copies of this process --

_copies: dict[str, tuple[str, HostCopy]] = {}  # by run: chain and copy
_copies_lock = threading.Lock()


def open_copy(directory: Path, run: str, chain: str, num_bytes: int) -> HostCopy:
    """This process's copy of a run's chain; closes that of an older chain."""
    with _copies_lock:
        current = _copies.get(run)
        if current is None or current[0] != chain:
            if current is not None:
                current[1].close()
            name = re.sub(r"[^A-Za-z0-9_]+", "_", run)[:64] + "-" + chain
            _copies[run] = (chain, HostCopy(directory, name, num_bytes))
        return _copies[run][1]


@atexit.register
def close_all() -> None:
    """Close all copies of this process: at its end, and in tests."""
    with _copies_lock:
        for _, copy in _copies.values():
            copy.close()
        _copies.clear()


def _await_writer(fd: int, what: str) -> None:
    if not lock_within(fd, WRITER_S, is_shared=True):
        raise WireError(f"waited {WRITER_S:g} s for {what}.")
