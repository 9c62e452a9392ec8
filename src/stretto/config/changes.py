"""Which keys of a run's saved config a resumed run has otherwise."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from stretto.config.load import dump, masked
from stretto.config.reading.toml import is_secret
from stretto.config.section import Path, Section, dotted, show

NOT_COMPARED = frozenset({"resume", "run", "output_dir"})
"""Where the run lives and how it starts."""
FOUND_ANEW = frozenset({"port", "router_port", "backend_port", "base_url", "admin_base_url"})
"""Addresses: a start may find others by itself."""
_MOST_CHARACTERS = 60


def changes(saved: FilePath, given: Section, resolved: Section | None = None) -> list[str]:
    """Lines `key: old -> new` for every key whose value differs from the saved config; [] if there is none to read.

    given: the config of this start; resolved: what the launcher made of it. A value that the launcher chose
    (threads, addresses) is no change.
    """
    try:
        old = json.loads(saved.read_text())
    except (OSError, ValueError):
        return []
    new, chosen = dump(resolved or given), dump(given)
    found = [
        (path, before, after, _at(chosen, path))
        for path, before, after in _differences(old, new)
        if path[0] not in NOT_COMPARED and path[-1] not in FOUND_ANEW
    ]
    return [
        f"{dotted(path)}: {_shown(path, before)} -> {_shown(path, wanted)}"
        for path, before, after, wanted in found
        if wanted == after
        or isinstance(wanted, dict)  # of a new section the launcher may have filled in a part
    ]


def _differences(old: Any, new: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Paths with their two values; a table that one side does not have is one difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differences(old.get(name), new.get(name), (*path, name))
    elif _are_tables(old) and _are_tables(new) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new)):
            yield from _differences(before, after, (*path, index))
    elif old != new:
        yield path, old, new


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _at(data: Any, path: Path) -> Any:
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _shown(path: Path, value: Any) -> str:
    if is_secret(str(path[-1])) and value is not None:
        return "(not shown)"
    return textwrap.shorten(show(masked(value)), _MOST_CHARACTERS, placeholder=" ...")
