"""All tables of spellings, and the search for the row of a path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from stretto.config.spelling import KeyPath, Row, Table
from stretto_prime import inference, orchestrator, others, run, sft, trainer

PARTS = (run, trainer, orchestrator, inference, sft)
"""Modules with prime-rl's keys, in the order of the page."""
TABLES: tuple[Table, ...] = tuple(table for part in (*PARTS, others) for table in part.TABLES)


@cache
def rows_of(section: str) -> tuple[Row, ...]:
    """Rows of a section, except those of keys that are the same; paths are relative to it."""
    rows = [_anchored(row, table.below) for table in TABLES if table.section == section for row in table.rows]
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


LISTS = {"orchestrator.train.source": "orchestrator.env", "orchestrator.eval.source": "orchestrator.eval.env"}
"""Our path of a list of tables, where it is another one."""


def names_of_prime_rl(verb: str, word: str) -> list[str]:
    """Keys of prime-rl's that contain a word, and what each is here, in the files of a verb."""
    part = word.replace("-", "_")
    found: dict[str, str] = {}
    for table in TABLES:
        if table.verb != (verb if verb in ("sft", "eval") else "rl") or table in others.TABLES:
            continue
        base = table.path.removesuffix(table.below.replace("*", "0")).removesuffix(".")
        for theirs, ours in LISTS.items():
            base = base.replace(theirs, ours)
        for row in table.rows:
            path = ".".join(filter(None, (table.path, row.theirs)))
            if part in path and (row.ours is not None or row.is_refused):
                found.setdefault(path, f"{path}: {_meaning(row, base)}")
    return sorted(found.values())


def _meaning(row: Row, base: str) -> str:
    if row.is_refused:
        return f"refused: {row.instead}"
    if not row.ours:
        return f"decides nothing: {row.note}"
    ours = row.ours[1:] if row.ours.startswith("/") else ".".join(filter(None, (base, row.ours.removesuffix(".*"))))
    return f"--{ours.replace('_', '-')}" + (f" ({row.note})" if row.note else "")


def aliases_of(sections: Iterable[str]) -> dict[str, str]:
    """Other names of the keys of sections, for help and documents."""
    rows = [row for section in sections for row in rows_of(section)]
    return {row.theirs: row.ours.removeprefix("/") for row in rows if row.ours and row.ours != row.theirs}
