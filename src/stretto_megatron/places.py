"""Where a checkpoint of Megatron-Core is: its iterations, and which of them is meant."""

from __future__ import annotations

import re
from pathlib import Path

from stretto.base.errors import DataError

POINTER, METADATA = "latest_checkpointed_iteration.txt", ".metadata"


def is_megatron(directory: Path) -> bool:
    """Is a directory a checkpoint of Megatron-Core, or one iteration of it?"""
    if (directory / POINTER).exists() or (directory / METADATA).exists():
        return True
    return directory.is_dir() and any(re.match(r"(iter|mp_rank)_\d", path.name) for path in directory.iterdir())


def find_iteration(directory: Path, step: int | None = None) -> Path:
    """The directory of iteration `step` of a checkpoint, or of the latest; a directory of one iteration is itself.

    Raises: DataError if there is none.
    """
    if (directory / METADATA).exists() or any(directory.glob("mp_rank_*")):
        return directory
    if step is not None:
        name = f"iter_{step:07d}"
    elif (directory / POINTER).exists():
        text = (directory / POINTER).read_text().strip()
        if text != "release" and not text.isdigit():
            raise DataError(f"{directory / POINTER}: {text[:40]!r} is neither a number nor `release`")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = max((path.name for path in directory.glob("iter_*")), default="iter_*")
    if not (directory / name).is_dir():
        there = ", ".join(sorted(path.name for path in directory.glob("iter_*"))[-4:]) or "none"
        raise DataError(f"{directory}: no {name}; the iterations there are {there}")
    return directory / name


def is_older(made: Path, place: Path) -> bool:
    """Is what was made of an iteration older than a file of it, which was written again since?"""
    latest = lambda directory: max((each.stat().st_mtime for each in directory.rglob("*") if each.is_file()), default=0)
    return bool(latest(made) < latest(place))
