"""Kinds of rules, and how a rule names keys.

Each module here has a table `RULES` of rules by class of section. A rule is checked for every such section of a root;
its paths are relative to the section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stretto.config.section import Section, show
from stretto.config.sections.run import RunKeys

SHARED_KEYS = frozenset(RunKeys.model_fields) | {"ckpt"}
At = Callable[[str], str]
"""From a path in a section to the path that a user writes."""


@dataclass(frozen=True)
class Problem:
    """A broken rule: its message, and the dotted paths to blame, for which the loader adds lines."""

    paths: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Place:
    """A key in a message: `{0}` is `path = value`; `{0.path}` and `{0.value}` are its parts."""

    path: str
    raw: Any

    @property
    def value(self) -> str:
        return show(self.raw)

    def __str__(self) -> str:
        return self.path if isinstance(self.raw, Section) else f"{self.path} = {self.value}"


def problem(section: Any, at: At, paths: str, message: str, it: Any = None) -> Problem:
    """A message in which `{0}`, `{1}`, ... are keys; those after a `|` are not to blame."""
    blamed, _, named = paths.partition("|")
    places = [Place(at(path), value_of(section, path)) for path in (blamed + named).split()]
    return Problem(tuple(place.path for place in places[: len(blamed.split())]), message.format(*places, it=it))


@dataclass(frozen=True)
class Rule:
    """Keys that do not go together."""

    paths: str
    when: Callable[[Any], Any]
    """Takes the section; true if it breaks the rule. What it returns is `{it}` in the message."""
    message: str

    def __call__(self, section: Section, at: At) -> Iterator[Problem]:
        if it := self.when(section):
            yield problem(section, at, self.paths, self.message, it)


@dataclass(frozen=True)
class Each:
    """A rule that can be broken in several ways or places."""

    find: Callable[[Any], Iterator[tuple[str, str] | tuple[str, str, Any]]]
    """Takes the section; yields paths and message of every breach, and `{it}` if the message has one."""

    def __call__(self, section: Section, at: At) -> Iterator[Problem]:
        for paths, message, *it in self.find(section):
            yield problem(section, at, paths, message, *it)


@dataclass(frozen=True)
class Idle:
    """Keys that do nothing because of the value of another key; they are refused."""

    keys: str
    """Paths; `*` is every item of a list and every key of a table."""
    owner: str
    """Path of the other key."""
    is_off: Callable[[Any], Any]
    """Takes the section; true, or the reason as text, if the keys do nothing."""
    remedy: str = "change that"

    def __call__(self, section: Section, at: At) -> Iterator[Problem]:
        if not (off := self.is_off(section)):
            return
        owner = Place(at(self.owner), value_of(section, self.owner))
        found = [each for pattern in self.keys.split() for each in matching(section, pattern)]
        given = [Place(at(path), value) for path, value, default in found if value not in (None, default)]
        if given:
            why = f" ({off})" if isinstance(off, str) else ""
            what = f"{' and '.join(map(str, given))} {'do' if given[1:] else 'does'} nothing with {owner}{why}"
            yield Problem((*(place.path for place in given), owner.path), f"{what}; leave out, or {self.remedy}")


Check = Callable[[Any, At], Iterator[Problem]]
Rules = dict[type[Section], tuple[Check, ...]]


def value_of(section: Any, path: str) -> Any:
    """The value at a dotted path; None below something that is None."""
    for part in path.split("."):
        if isinstance(section, list | dict):
            section = section[int(part)] if isinstance(section, list) else section.get(part)
        else:
            section = getattr(section, part, None)
    return section


def matching(section: Any, pattern: str, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, value and default of the keys that match a pattern."""
    head, _, rest = pattern.partition(".")
    fields = type(section).model_fields if isinstance(section, Section) else {}
    if isinstance(section, list):
        items = [(str(i), item, None) for i, item in enumerate(section)]
    elif isinstance(section, dict):
        items = [(key, item, None) for key, item in section.items() if head in ("*", key)]
    else:
        names = [name for name in fields if head in ("*", name)]
        items = [(name, getattr(section, name), fields[name].default) for name in names]
    for name, value, default in items:
        if rest:
            yield from matching(value, rest, f"{at}{name}.")
        else:
            yield f"{at}{name}", value, default


def walk(section: Section, at: str = "") -> Iterator[tuple[Section, str]]:
    """All sections below a section and then itself, each with its path."""
    for name in type(section).model_fields:
        value, path = getattr(section, name), f"{at}.{name}" if at else name
        if isinstance(value, Section):
            yield from walk(value, path)
        elif isinstance(value, list | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, Section):
                    yield from walk(item, f"{path}.{key}")
    yield section, at


def below(path: str) -> At:
    """How keys of the section at a path are named."""
    return lambda key: f"{path}.{key}" if path else key


def of_part(part: str) -> At:
    """How keys of a process of `rl` are named: some of them are the run's."""
    return lambda key: key if key.partition(".")[0] in SHARED_KEYS else f"{part}.{key}"
