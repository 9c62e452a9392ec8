"""Files that are complete or absent, and files that a living process has locked.

Atomic writes: a file is durable once its bytes are on disk (fsync of the file) and its name is (fsync of its
directory). Locks (flock): the kernel releases a lock when its holder dies, in whatever way and in whatever PID
namespace. So an unlocked file means that its owner is dead. A lock belongs to an open file description, which child
processes and mappings share.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

PUBLISHED, COPY = "stretto-weights-", "stretto-copy-"
"""Prefixes of the names of weights in shared memory (transports/weights/shm.py, host_copy.py)."""

SHARED_MEMORY = Path("/dev/shm")

_POLL_S = 0.005


def flush(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a directory, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def flush_parents(path: Path, root: Path) -> None:
    """Wait until the names of `path` and of its parents, up to `root`, are on disk."""
    for directory in path.parents:
        flush(directory)
        if directory == root:
            return


def put_in_place(part: Path, path: Path, *, is_durable: bool = False) -> None:
    """Rename a finished file or directory `part` to `path`; readers see the old one or the new.

    is_durable: it is on disk when this returns (the directories above its own are not flushed).
    """
    if is_durable:
        for each in (*part.rglob("*"), part):
            flush(each)
    old = path.with_name(f".{path.name}.old")
    if path.is_dir() and not path.is_symlink():  # a rename cannot replace a directory that is not empty
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    part.replace(path)
    if is_durable:
        flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def atomic_path(path: Path, *, is_durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` at the end and is removed after an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # left by a killed process with the same pid
    try:
        yield part
        put_in_place(part, path, is_durable=is_durable)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:  # a write to an open file names none
            error.filename = str(path)
        raise


def whole_name(name: str) -> str:
    """The name of the file that a killed process was writing into the part `name`; other names as they are."""
    part = re.fullmatch(r"\.(.+)\.\d+", name)
    return part[1] if part else name


def write_atomic(path: Path, content: bytes, *, is_durable: bool = False, mode: int = 0o666) -> None:
    """Write a file so that readers see the old content or all of the new.

    At no time is its mode wider than `mode`.
    """
    with atomic_path(path, is_durable=is_durable) as part:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(content)


def cache_dir() -> Path:
    """Where this user keeps what can be made again: $XDG_CACHE_HOME/stretto, or ~/.cache/stretto."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stretto"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is missing, is incomplete or holds something else."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def read_rows(path: Path, *keys: str) -> list[dict[str, Any]] | None:
    """The JSON list of objects in a file, each with these keys; None if the file is missing or damaged."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= {*keys} for row in rows)
    return rows if is_whole else None


def identity(path: Path) -> tuple[int, int] | None:
    """What changes when a file or directory is written or made anew, whatever the clock says; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


# -- locks --


def open_locked(path: Path, *, is_shared: bool = False, is_new: bool = False) -> int:
    """Open and lock a file, creating it if needed; returns the descriptor.

    is_new: fail if the file exists. If a cleaner removes the file between open and lock, it is created again.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_EXCL if is_new else 0)
    while True:
        fd = os.open(path, flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Lock an open file; False if another process holds the lock or locks are not supported."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_within(fd: int, timeout_s: float, *, is_shared: bool = False) -> bool:
    """Try to lock an open file for up to timeout_s; returns whether it is locked."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(fd, is_shared=is_shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(fd: int) -> None:
    """Release the lock and close the file.

    Closing alone is not enough: a mapping of the file would keep the lock.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def write_holder(fd: int) -> None:
    """Write this process's number into a file that it has locked, for `holder`."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def read_holder(fd: int) -> str:
    """The number of the process that locked this file last; "" if none wrote it."""
    return os.pread(fd, 32, 0).decode(errors="replace").strip()


def holder(path: Path) -> str | None:
    """The number of the process that holds the lock of a file; None if no process holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if try_lock(fd, is_shared=True):
            fcntl.flock(fd, fcntl.LOCK_UN)
            return None
        return read_holder(fd) or None
    finally:
        os.close(fd)


def remove_unowned(directory: Path) -> int:
    """Remove weights that dead processes left in `directory`; returns how many.

    A publisher locks its file NAME; the users of a shared copy NAME lock NAME.users, and NAME.lock while they write.
    """

    def remove_copy(users: Path) -> None:
        for path in (users.with_suffix(""), users.with_suffix(".lock"), users):
            path.unlink(missing_ok=True)

    published = remove_abandoned(directory.glob(PUBLISHED + "*"), partial(Path.unlink, missing_ok=True))
    return published + remove_abandoned(directory.glob(f"{COPY}*.users"), remove_copy)


def remove_abandoned(paths: Iterable[Path], remove: Callable[[Path], object]) -> int:
    """Remove those of `paths` that are this user's and locked by nobody; returns how many."""
    removed = 0
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid() and try_lock(fd):
                remove(path)
                removed += 1
        except OSError:  # it stays
            continue
        finally:
            os.close(fd)
    return removed
