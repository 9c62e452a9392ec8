"""Every error that a user can meet, one class per person who must act.

A message says where (TOML path, file:line, record id), the value got, the rule, and what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


class boundary:
    """Turn any exception except a StrettoError into `kind`, with `where` in its message.

    Use it only at the named boundaries: a rollout, a server request, a monitor, the launcher.
    """

    __slots__ = ("_kind", "_where")

    def __init__(self, kind: type[StrettoError], where: str) -> None:
        self._kind, self._where = kind, where

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, cause: BaseException | None, __: Any) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, StrettoError):
            raise self._kind(f"{self._where}: {type(cause).__name__}: {cause}") from cause


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
        return "not UTF-8 text; save it as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON (line {error.lineno}: {json_fault(error)})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error)


def json_fault(error: json.JSONDecodeError) -> str:
    """What is wrong with a text that is not JSON, at which character of its line, and what to write."""
    text, at = error.doc, error.pos
    line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    rest, before = text[at:].lstrip(), text[:at].rstrip()
    place = f" (character {error.colno})"
    after_comma = rest.lstrip(", \n\t")
    if (before.endswith(",") or rest.startswith(",")) and after_comma[:1] in ("}", "]"):
        comma = text.rfind(",", 0, text.index(after_comma[0], at) + 1)
        column = comma - text.rfind("\n", 0, comma)
        return f"a comma before {after_comma[0]!r} (character {column}), where JSON allows none; remove it"
    if text.strip() in ("{", "["):
        return "the line ends where the object begins; a .jsonl file has one whole object on every line"
    if not rest:
        return "it ends too early; close what is open: each { [ and quote"
    if word := re.match(r"(None|True|False|nan|inf)\b", rest):
        ours = {"None": "null", "True": "true", "False": "false"}.get(word.group())
        return f"{word.group()}{place} is Python; write {ours or 'the number, or null'}"
    if rest.startswith("'"):
        return f"a text in single quotes{place}; write double quotes, as json.dumps does"
    if error.msg.startswith("Expecting property name"):
        return f'a key without double quotes{place}; write {{"key": value}}'
    if error.msg.startswith("Expecting ',' delimiter"):
        return f"a comma, or the closing bracket, is missing before `{line[error.colno - 1 :][:20]}`{place}"
    if error.msg.startswith("Expecting ':'"):
        return f"a colon is missing before `{line[error.colno - 1 :][:20]}`{place}"
    if error.msg.startswith("Extra data"):
        return f"more follows after its end{place}; one object on each line"
    if error.msg.startswith(("Invalid control character", "Unterminated string")):
        return f"a quote is not closed where the line ends{place}; a line break in a text is written \\n"
    if error.msg.startswith("Invalid \\"):
        return f"a backslash{place} that is none of JSON's; write two"
    return f"no value of JSON at `{line[error.colno - 1 :][:20]}`{place}; a text has double quotes"


def _file_above(path: Path) -> Path | None:
    return next((each for each in (path, *path.parents) if each.is_file()), None)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
