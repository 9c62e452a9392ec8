"""New scores of a run's rollouts as a file beside its ledger, which is only ever added to: RUN/scores/NAME.jsonl.

The first line says which rewards they are of; each other line is a rollout. A file is written whole, or not at all.
Beside it NAME.json is what changes with them, which the page shows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import ConfigError, DataError
from stretto.base.files import write_atomic
from stretto.base.paths import RunDir

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
Key = tuple[int, int]
"""Group and member of a rollout."""


class Line(msgspec.Struct, frozen=True):
    """The score of one rollout; old: of the run itself."""

    group: int
    member: int
    score: float
    old: float


def path_of(run: RunDir, name: str) -> Path:
    """The file of these scores. Raises: ConfigError for a name that is no name of a file."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"scores {name!r}: use letters, digits, '_', '-' and '.'")
    return run.path / "scores" / f"{name}.jsonl"


def make_place(run: RunDir, name: str) -> Path:
    """The file of these scores, whose directory is made. Raises: ConfigError if nothing can be written there."""
    path = path_of(run, name)
    try:
        path.parent.mkdir(exist_ok=True)
        is_writable = os.access(path.parent, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise ConfigError(f"--write {name}: nothing can be written to {path.parent}; rescore a copy of the run")
    return path


def save(
    run: RunDir, name: str, rewards: Iterable[str], lines: Iterable[Line], found: dict[str, Any] | None = None
) -> Path:
    """Write scores, instead of those of this name if there are some; found: what changes with them."""
    path = make_place(run, name)
    rows: list[Any] = [{"rewards": list(rewards)}, *lines]
    write_atomic(path, b"\n".join(map(msgspec.json.encode, rows)) + b"\n", is_durable=True)
    about = path.with_suffix(".json")
    if found is None:
        about.unlink(missing_ok=True)
    else:
        write_atomic(about, msgspec.json.encode(found) + b"\n")
    return path


def load(run: RunDir, name: str) -> dict[Key, float]:
    """The scores of this name. Raises: ConfigError if there are none; DataError for a damaged file."""
    path = path_of(run, name)
    if not path.exists():
        found = ", ".join(sorted(each.stem for each in path.parent.glob("*.jsonl"))) or "none"
        raise ConfigError(
            f"{path}: there are no scores {name!r} (there are: {found}); stretto rescore {run} --write {name}"
        )
    try:
        lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()[1:]]
    except msgspec.DecodeError as cause:
        raise DataError(f"{path}: damaged: {cause}") from cause
    return {(line.group, line.member): line.score for line in lines}
