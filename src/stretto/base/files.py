"""Atomic writes: a file or directory is complete or absent, and, if durable, survives a power cut.

A file is durable once its bytes are on disk (fsync of the file) and its name is (fsync of its directory).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes, *, is_durable: bool = False, mode: int = 0o666) -> None:
    """Write a file so that readers see the old content or all of the new.

    At no time is its mode wider than `mode`.
    """
    with atomic_path(path, is_durable=is_durable) as part:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(content)
