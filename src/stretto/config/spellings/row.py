"""What a row of the table of spellings is: a key as others write it, and what it is here.

A table belongs to one of our sections, and its paths are relative to that: wherever the section stands, the rows hold.
In paths `*` is any one part. `ours` is relative to the section too, or with a leading `/` to the root; "" means that
the key decides nothing here, and None that it has the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]


class Given:
    """In `sets`: the value that was given."""


@dataclass(frozen=True)
class Instead:
    """In `values`: this value is refused, and what to write instead."""

    text: str


class Nothing:
    """In `values`: this value says what holds here anyway, and sets nothing."""


NO_DEFAULT = object()
"""The default of a key whose default is not stated, or that is required."""


@dataclass(frozen=True)
class Row:
    """One key, with the meaning it has where it comes from."""

    theirs: str
    default: Any = NO_DEFAULT
    """Their default, None included."""
    ours: str | None = None
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values that are called otherwise here; those that are not in it stay as they are."""
    instead: str = ""
    """Present: the key is refused, and this says why and what to write."""
    unless: tuple[Any, ...] = ()
    """Values of a refused key that say what holds here anyway: they are accepted."""
    sets: tuple[tuple[str, Any], ...] = ()
    """Further keys that it sets where nobody gives them."""
    note: str = ""
    """What else a user should know, for the page."""
    beware: str = ""
    """Present: the value counts something else there; a note at the start says this."""
    is_old: bool = False
    """Only in releases before 0.8, or only in the documents."""

    @property
    def is_refused(self) -> bool:
        return bool(self.instead)


@dataclass(frozen=True)
class Table:
    """The keys of one of their tables."""

    path: str
    """Where it stands in their file; items of a list of tables are `0`."""
    section: str
    """The class of ours that the rows are relative to."""
    rows: tuple[Row, ...]
    verb: str = "rl"
    """The verb whose file it is."""
    below: str = ""
    """Where the table stands below that section."""
    is_listed: bool = True
    """Whether the page of prime-rl's keys has it."""


def same(theirs: str, default: Any = NO_DEFAULT, note: str = "", **more: Any) -> Row:
    """A key with the same name and meaning."""
    return Row(theirs, default, note=note, **more)


def moved(theirs: str, default: Any, ours: str, note: str = "", **more: Any) -> Row:
    """A key with the same meaning and another name, place, or words for its values."""
    return Row(theirs, default, ours, note=note, **more)


def refused(theirs: str, default: Any, instead: str, *, unless: tuple[Any, ...] = (), **more: Any) -> Row:
    """A key that does not exist here. unless: values that are accepted, for they say what holds anyway."""
    return Row(theirs, default, instead=instead, unless=unless, **more)


def idle(theirs: str, default: Any, note: str, **more: Any) -> Row:
    """A key that is accepted with any value and decides nothing here; note: why."""
    return Row(theirs, default, "", note=note, **more)


def old(*rows: Row) -> tuple[Row, ...]:
    """Keys of releases before 0.8."""
    return tuple(Row(**{**vars(row), "is_old": True}) for row in rows)
