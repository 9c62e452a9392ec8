"""The search for what a key in another spelling is: of the frameworks that add-ons know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from stretto.addons import load_all, missing_text, wrong
from stretto.config.spelling import KeyPath, Row, Spelling, Table

GROUP = "stretto.spellings"


@cache
def spellings() -> dict[str, Spelling]:
    """What add-ons offer, by the framework's name."""
    found = load_all(GROUP)
    for name in (name for name, each in found.items() if not isinstance(each, Spelling)):
        raise wrong(GROUP, name, f"it is {found[name]!r}, which is no Spelling of stretto")
    return found


def unread() -> str:
    """What to add to a message about an unknown key: whose names are not read here, and why; "" if all are."""
    return missing_text(GROUP, "names")


@cache
def tables() -> tuple[Table, ...]:
    """The tables of all frameworks."""
    return tuple(table for spelling in spellings().values() for table in spelling.tables)


@cache
def rows_of(section: str) -> tuple[Row, ...]:
    """Rows of a section, except those of keys that are the same; paths are relative to it."""
    rows = [_anchored(row, table.below) for table in tables() if table.section == section for row in table.rows]
    return tuple(row for row in rows if row.ours is not None or row.is_refused or row.values or row.sets)


def _anchored(row: Row, below: str) -> Row:
    path = ".".join(filter(None, (below, row.theirs)))
    return row if path == row.theirs else replace(row, theirs=path)


@cache
def _by_first(sections: tuple[str, ...]) -> Mapping[str, tuple[tuple[KeyPath, Row], ...]]:
    """Rows of sections by the first part of their paths, longest first; later sections win."""
    found: dict[str, dict[KeyPath, Row]] = {}
    for section in sections:
        for row in rows_of(section):
            path = tuple(row.theirs.split("."))
            found.setdefault(path[0], {})[path] = row
    # The longest first; among equally long ones, the one with fewer wildcards.
    order = lambda item: (-len(item[0]), item[0].count("*"))
    return {first: tuple(sorted(rows.items(), key=order)) for first, rows in found.items()}


def match(sections: Iterable[str], path: KeyPath) -> tuple[int, Row] | None:
    """The row for the beginning of a path below these sections, and how many parts it covers."""
    for theirs, row in _by_first(tuple(sections)).get(str(path[0]), ()):
        if len(theirs) <= len(path) and all(a in ("*", str(b)) for a, b in zip(theirs, path)):
            return len(theirs), row
    return None


def renamed(row: Row, path: KeyPath) -> KeyPath:
    """Our path for a path that a row covers: wildcards are filled in from the path."""
    assert row.ours
    filled = iter([part for theirs, part in zip(row.theirs.split("."), path) if theirs == "*"])
    return tuple(next(filled) if part == "*" else part for part in row.ours.removeprefix("/").split("."))


def aliases_of(sections: Iterable[str]) -> dict[str, str]:
    """Other names of the keys of sections, for help and documents."""
    rows = [row for section in sections for row in rows_of(section)]
    return {row.theirs: row.ours.removeprefix("/") for row in rows if row.ours and row.ours != row.theirs}
