"""Every error that a user can meet, one class per person who must act.

A message says where (TOML path, file:line, record id), the value got, the rule, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDED_FIRST = "ended while this rank was still working"
"""In the message of a process that fails because another has ended, by default the orchestrator: that one knows the
cause. The name of another process stands before it."""


class StrettoError(Exception):
    """Something is wrong outside our own code; the command line prints it without a traceback."""

    def __init__(self, *args: object, reason: str | None = None) -> None:
        """reason: which reason of records/outcomes.py a rollout ends for; None: that of the error's class."""
        super().__init__(*args)
        self.reason = reason


class ConfigError(StrettoError):
    """The user must change a setting or a command."""


class DataError(StrettoError):
    """The data, the checkpoint or the model directory is bad; who wrote it must fix it."""


class EnvError(StrettoError):
    """The environment failed (a rollout, its reward, its task list)."""


class EngineError(StrettoError):
    """Infrastructure failed: an engine, a process, a device, a deadline."""


class WireError(StrettoError):
    """Two processes do not understand each other: schema, version or network."""


@contextmanager
def boundary(kind: type[StrettoError], where: str) -> Iterator[None]:
    """Turn any exception except a StrettoError into `kind`, with `where` in its message.

    Use it only at the named boundaries: a rollout, a server request, a monitor, the launcher.
    """
    try:
        yield
    except StrettoError:
        raise
    except Exception as cause:
        raise kind(f"{where}: {type(cause).__name__}: {cause}") from cause


# -- files --


def near_path(path: Path) -> Path | None:
    """A path that exists and differs from `path` by one part of a like name; None if there is none."""
    import difflib

    for place in (path, *path.parents):
        folder = place.parent
        if place == folder or not _is_directory(folder):
            continue
        try:
            names = sorted(each.name for each in folder.iterdir())
        except OSError:
            return None
        for name in difflib.get_close_matches(place.name, names, n=3):
            if (found := folder / name / path.relative_to(place)).exists():
                return found
        return None
    return None


def meant_path(path: Path, end: str = "") -> str:
    """`; did you mean X?`, or which directory is missing and `end`; `end` alone if neither is known."""
    path = path.expanduser()
    if (near := near_path(path)) is not None:
        return f"; did you mean {near}?"
    return end if _is_directory(path.parent) else f", and no directory {path.parent}{end}"


def reason_of(error: Exception, path: Path | None = None) -> str:
    """Why an operation on a file failed, without numbers of the system; path: a path of a like name is looked for."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file" + (meant_path(path) if path is not None else "")
    if isinstance(error, IsADirectoryError):
        return "this is a directory, not a file"
    if isinstance(error, NotADirectoryError):
        file = _file_above(path) if path is not None else None
        return f"{file} is a file, not a directory" if file is not None else "a part of it is a file, not a directory"
    if isinstance(error, PermissionError):
        return "this user has no permission"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON (line {error.lineno}: {error.msg})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error)


def _file_above(path: Path) -> Path | None:
    return next((each for each in (path, *path.parents) if each.is_file()), None)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
