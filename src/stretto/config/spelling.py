"""Spellings of keys: a key as another framework or vLLM writes it, and what it is here. lookup.py finds them.

The tables of other frameworks are of add-ons (the group stretto.spellings), each with one `Spelling`. A table belongs
to one of our sections, and its paths are relative to that section, wherever it is used. In paths `*` is any one part.
`ours` is relative to the section too, or with a leading `/` to the root; "" means that the key decides nothing here,
and None that it has the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

KeyPath = tuple[str | int, ...]
"""Place of a value in a config: keys, and indices of lists."""


class GivenName:
    """In `sets`: stands for the package that the row's own key names: `my-tasks` for `owner/my-tasks@0.1`."""


@dataclass(frozen=True)
class Instead:
    """In `values`: refuses a value and says what to write instead."""

    text: str


class Nothing:
    """In `values`: accepts a value that describes the fixed behaviour here; it sets nothing."""


NO_DEFAULT = object()
"""For a key that is required, or whose default their documents do not state."""


@dataclass(frozen=True)
class Row:
    """One key of another framework."""

    theirs: str
    default: Any = NO_DEFAULT
    """Their default, None included."""
    ours: str | None = None
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Our value for each of their values; values that are not in it stay as they are."""
    instead: str = ""
    """If not empty, the key is refused: why, and what to write."""
    unless: tuple[Any, ...] = ()
    """Values of a refused key that are accepted, because they describe the fixed behaviour here."""
    sets: tuple[tuple[str, Any], ...] = ()
    """Further keys that it sets, unless they are given too."""
    note: str = ""
    """What else a user should know; for the page from-prime-rl.md."""
    beware: str = ""
    """If not empty, the value counts something else there; logged as a note at the start."""
    is_old: bool = False
    """Exists only in releases before 0.8, or only in their documents."""

    @property
    def is_refused(self) -> bool:
        return bool(self.instead)


@dataclass(frozen=True)
class Table:
    """The keys of one of their tables."""

    path: str
    """Its path in their file; items of a list of tables are `0`."""
    section: str
    """Name of our class that the rows are relative to."""
    rows: tuple[Row, ...]
    verb: str = "rl"
    """The verb whose file it is."""
    below: str = ""
    """Path of the table below that section."""
    is_listed: bool = True
    """Whether the page from-prime-rl.md lists it."""


def same(theirs: str, default: Any = NO_DEFAULT, note: str = "", **more: Any) -> Row:
    """A key with the same name and meaning."""
    return Row(theirs, default, note=note, **more)


def all_same(defaults: Mapping[str, Any]) -> tuple[Row, ...]:
    """Keys with the same name and meaning, each with its default."""
    return tuple(Row(theirs, default) for theirs, default in defaults.items())


def moved(theirs: str, default: Any, ours: str, note: str = "", **more: Any) -> Row:
    """A key with the same meaning and another name, place, or words for its values."""
    return Row(theirs, default, ours, note=note, **more)


def refused(theirs: str, default: Any, instead: str, *, unless: tuple[Any, ...] | None = None) -> Row:
    """A key that does not exist here. unless: values that are accepted; None: their default is."""
    if unless is None:
        unless = () if default is NO_DEFAULT else ("None" if default is None else default,)
    return Row(theirs, default, instead=instead, unless=unless)


def idle(theirs: str, default: Any, note: str, **more: Any) -> Row:
    """A key that is accepted with any value and decides nothing here; note: why."""
    return Row(theirs, default, "", note=note, **more)


def old(*rows: Row) -> tuple[Row, ...]:
    """Keys of releases before 0.8."""
    return tuple(replace(row, is_old=True) for row in rows)


@dataclass(frozen=True)
class Correction:
    """A value that follows from several others in a file of another framework."""

    path: KeyPath
    value: Any
    why: str = ""
    """What a note says of the value as it was written; "" if nothing."""


@dataclass(frozen=True)
class Spelling:
    """The keys of another framework, which an add-on offers."""

    tables: tuple[Table, ...]
    names: Callable[[str, str], list[str]] = lambda verb, word: []
    """Its keys that contain a word, and what each is here, in the files of a verb: (verb, word)."""
    merged: Callable[[Sequence[KeyPath]], list[KeyPath]] = list
    """The paths of a file, where two of its lists are one list here."""
    corrections: Callable[[str, Mapping[KeyPath, Any], Mapping[KeyPath, str]], list[Correction]] = (
        lambda root, values, spelled: []
    )
    """What else its values mean together: (class of the root, values in our spelling, how each was written)."""
    words: Callable[[str, list[str]], list[str]] = lambda verb, words: words
    """The words after a verb, (verb, words), in which its own flags have become keys."""
