"""What a rule is: a function that takes a section and yields a Problem wherever its keys do not go together.

    def order_of_bounds(s: RatioSection, at: At) -> Problems:
        low, high = at("low"), at("high")
        if s.low >= s.high:
            yield Problem((low, high), f"{low} must be below {high}; lower it")

Each module here has a table `RULES` of such functions by class of section. They are called for every such section of a
root; `at` names the section's keys as a user writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from stretto.base.errors import ConfigError
from stretto.config.derived import LOCAL_HOSTS
from stretto.config.section import Section, show
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.run import RunKeys

SHARED_KEYS = frozenset(RunKeys.model_fields) | {"ckpt"}


@dataclass(frozen=True)
class Named:
    """A key in a sentence: `path = value`, or the path alone of a section."""

    path: str
    held: Any = field(default=None, compare=False)

    @property
    def value(self) -> str:
        return show(self.held)

    def __str__(self) -> str:
        return self.path if isinstance(self.held, Section) else f"{self.path} = {self.value}"


@dataclass(frozen=True)
class Problem:
    """A broken rule: the key to blame, or several, and a sentence about them. The loader adds files and lines."""

    blamed: Named | tuple[Named, ...]
    sentence: str
    is_of_run: bool = False
    """Whether a process that is started alone, with its part of the run's file, may do so."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The dotted paths to blame."""
        return tuple(key.path for key in (self.blamed if isinstance(self.blamed, tuple) else (self.blamed,)))


Problems = Iterator[Problem]


@dataclass(frozen=True)
class At:
    """A section, and how its keys are named."""

    section: Any
    name: Callable[[str], str]
    """From a path in the section to the path that a user writes."""

    def __call__(self, path: str) -> Named:
        return Named(self.name(path), value_of(self.section, path))


Rule = Callable[[Any, At], Problems]
Rules = dict[type[Section], tuple[Rule, ...]]


def idle(at: At, keys: str | Sequence[str], owner: str, remedy: str = "change that", *, why: str = "") -> Problems:
    """Keys that do nothing because of the value of another key, its owner; they are refused if they are given.

    keys: paths, in which `*` is every item of a list and every key of a table.
    """
    patterns = [keys] if isinstance(keys, str) else keys
    found = [each for pattern in patterns for each in matching(at.section, pattern)]
    given = [Named(at.name(path), value) for path, value, default in found if value not in (None, default)]
    if not given:
        return
    reason = f" ({why})" if why else ""
    do = "do" if given[1:] else "does"
    what = f"{' and '.join(map(str, given))} {do} nothing with {at(owner)}{reason}"
    them = "them" if given[1:] else "it"
    yield Problem((*given, at(owner)), f"{what}; leave {them} out, or {remedy}")


def refused_by(check: Callable[..., object], key: Named, *given: Any) -> Problems:
    """The error of a check that takes the path last, as a problem at that path."""
    try:
        check(*given, key.path)
    except ConfigError as error:
        yield Problem(key, str(error))


def is_address(url: str) -> bool:
    """Whether a URL names a scheme, a host and, if any, a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


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


def below(section: Section, path: str) -> At:
    """The section at a path."""
    return At(section, lambda key: f"{path}.{key}" if path else key)


def of_part(section: Section, part: str) -> At:
    """The section of a process of `rl`: some of its keys are the run's."""
    return At(section, lambda key: key if key.partition(".")[0] in SHARED_KEYS else f"{part}.{key}")


def valid_divisors(number: int, divisor: int) -> str:
    """The divisors of a number, if the given one is none; else ""."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0) if number % divisor else ""


def known_models(models: Collection[str], name: str) -> str:
    """Which frozen models a run has, or how to add the one of this name."""
    return f"it has {', '.join(models)}" if models else f"add a table [models.{name}]"


def is_served(base_url: list[str] | str, engine: InferenceSection, *, is_only: bool) -> bool:
    """Whether one of the addresses (with is_only, the only one) is that of the engine."""
    given = [base_url] if isinstance(base_url, str) else base_url
    hosts = (*LOCAL_HOSTS, engine.server.host)
    parts = [urlsplit(url) for url in given if is_address(url)]
    found = [each for each in parts if each.hostname in hosts and (each.port or 80) == engine.server.port]
    return bool(found) and (len(given) == 1 or not is_only)
