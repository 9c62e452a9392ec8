"""Keys whose values differ between a run's saved config and the config it is resumed with."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.config.load import dump
from stretto.config.masks import is_secret, masked
from stretto.config.section import KeyPath, Section, dotted, show

NOT_COMPARED = frozenset({"resume", "run", "output_dir"})
"""Where the run lives and how it starts."""
CHOSEN_BY_START = frozenset({"port", "router_port", "backend_port", "base_url", "admin_base_url"})
"""Addresses, which a start may choose anew."""
_MAX_CHARACTERS = 60


def changes(saved: Path, given: Section, resolved: Section | None = None) -> list[str]:
    """Lines `key: old -> new` for keys that differ from the saved config; [] if it is unreadable.

    given: the config of this start; resolved: the same with the launcher's choices (threads, addresses), which do not
    count as changes.
    """
    try:
        old = json.loads(saved.read_text())
    except (OSError, ValueError):
        return []
    new, chosen = dump(resolved or given), dump(given)
    found = [
        (path, before, after, _at(chosen, path))
        for path, before, after in differences(old, new)
        if path[0] not in NOT_COMPARED and path[-1] not in CHOSEN_BY_START
    ]
    return [
        f"{dotted(path)}: {_shown(path, before)} -> {_shown(path, requested)}"
        for path, before, after, requested in found
        if requested == after or isinstance(requested, dict)  # a new section: the launcher may have filled in a part
    ]


def differences(old: Any, new: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Paths with their two values; a table that only one side has is one difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), (*path, name))
    elif _are_tables(old) and _are_tables(new) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new)):
            yield from differences(before, after, (*path, index))
    elif old != new:
        yield path, old, new


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _shown(path: KeyPath, value: Any) -> str:
    if is_secret(str(path[-1])) and value is not None:
        return "(not shown)"
    return textwrap.shorten(show(masked(value)), _MAX_CHARACTERS, placeholder=" ...")
