"""What a flag is: one row of the table, and the settings that it stands for."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from stretto.base.errors import ConfigError

Kind = Literal["switch", "integer", "number", "text", "list", "integers", "object"]
State = Literal["acts", "equal", "refused"]

KIND_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "text": "a text",
    "list": "one or more texts",
    "integers": "one or more integers",
    "object": "a JSON object",
}


@dataclass(frozen=True)
class Flag:
    """One flag of vime's command line."""

    name: str
    kind: Kind
    default: Any
    """vime's default; None for none. False for a switch."""
    help: str
    """What it means in vime."""
    state: State
    keys: tuple[str, ...] = ()
    """Keys of our config that it sets, or has a part in."""
    note: str = ""
    """equal: what does the same here. refused: why, and what to use instead."""
    is_copied: bool = False
    """Its value always goes to each of `keys` as it is."""
    is_value_of_key: bool = False
    """The first of `keys` holds its value, if it is set."""
    choices: tuple[Any, ...] = ()
    allowed: tuple[Any, ...] = ()
    """Values of a refused flag that are accepted, because they request nothing."""
    is_told: bool = False
    """equal: a note at the start says why nothing is set, unless the value is one of `allowed`."""

    @property
    def attribute(self) -> str:
        """`actor_num_nodes` of `--actor-num-nodes`."""
        return attribute_of(self.name)


def attribute_of(name: str) -> str:
    """`actor_num_nodes` of `--actor-num-nodes`."""
    return name.removeprefix("--").replace("-", "_")


def part(
    name: str,
    kind: Kind,
    default: Any,
    keys: str,
    help: str,
    *,
    note: str = "",
    choices: tuple[Any, ...] = (),
    is_copied: bool = False,
    is_value_of_key: bool = False,
) -> Flag:
    """A flag that has a part in our keys; `settings` of its module says how."""
    names = tuple(keys.split())
    return Flag(name, kind, default, help, "acts", names, note, is_copied, is_value_of_key, choices)


sets = partial(part, is_value_of_key=True)
"""A flag whose value is that of its first key; `settings` of its module says when it is set."""
copies = partial(sets, is_copied=True)
"""A flag whose value always goes to its keys as it is."""


def equal(name: str, kind: Kind, default: Any, note: str, help: str, *, choices: tuple[Any, ...] = ()) -> Flag:
    """A flag that is accepted and sets nothing, because what it requests happens anyway."""
    return Flag(name, kind, default, help, "equal", note=note, choices=choices)


def noted(
    name: str,
    kind: Kind,
    default: Any,
    note: str,
    help: str,
    *,
    allowed: tuple[Any, ...] = (),
    choices: tuple[Any, ...] = (),
) -> Flag:
    """A flag whose request is met in another way, with the same results; a note at the start says how."""
    neutral = () if default is None or kind == "switch" else (default,)
    values = (*neutral, *allowed)
    return Flag(name, kind, default, help, "equal", note=note, choices=choices, allowed=values, is_told=True)


def refused(name: str, kind: Kind, default: Any, note: str, help: str, *, allowed: tuple[Any, ...] = ()) -> Flag:
    """A flag that cannot be honoured; its default requests nothing, so it is accepted."""
    neutral = () if default is None or kind == "switch" else (default,)
    return Flag(name, kind, default, help, "refused", note=note, allowed=(*neutral, *allowed))


@dataclass(frozen=True)
class Setting:
    """A value for a key of our config."""

    path: str
    value: Any
    flags: tuple[str, ...] = ()
    """The flags that it follows from; a message about it names them."""


class Values(SimpleNamespace):
    """The value of every flag, given or vime's default, as attributes."""

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, str], flags: Mapping[str, Flag]) -> None:
        super().__init__(**values)
        self.given = given
        """By name of a given flag: the flag as it was typed, with its value."""
        self._flags = flags

    def has(self, *names: str) -> bool:
        """Was one of these flags given? A switch that a file sets to false was not."""
        return any(name in self.given and self.value(name) is not False for name in names)

    def value(self, name: str) -> Any:
        """The value of the flag of this name."""
        return getattr(self, attribute_of(name))

    def settings(self, *names: str) -> Iterator[Setting]:
        """The values of these flags for their first keys; none for a flag without a value."""
        for name in names:
            if (value := self.value(name)) is not None:
                yield Setting(self._flags[name].keys[0], value, (name,))

    def typed(self, *names: str) -> str:
        """These flags as they were typed; those that were not, with vime's default."""
        defaults = (f"{name} {self.value(name)} (the default)" for name in names)
        return ", ".join(self.given.get(name) or default for name, default in zip(names, defaults))


def listed(problems: Sequence[str]) -> str:
    """One problem as it is; several below their number."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join((f"{len(problems)} problems", *(f"  {each}" for each in problems)))


def parse(flag: Flag, words: list[str]) -> Any:
    """The value of a flag from the words after it.

    Raises: ConfigError for what is no such value.
    """
    if flag.kind == "switch":
        return True
    if flag.kind in ("list", "integers"):
        return [_single(flag, word) for word in words]
    return _single(flag, words[0])


def _single(flag: Flag, word: str) -> Any:
    try:
        value: Any = word
        if flag.kind in ("integer", "integers"):
            value = int(word)
        elif flag.kind == "number":
            value = float(word)
            if not math.isfinite(value):
                raise ValueError
        elif flag.kind == "object":
            value = json.loads(word)
            if not isinstance(value, dict):
                raise ValueError
    except ValueError:
        raise ConfigError(f"{flag.name} {word}: {KIND_WORDS[flag.kind]} is needed") from None
    if flag.choices and value not in flag.choices:
        near = difflib.get_close_matches(word, [str(each) for each in flag.choices], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{flag.name} {word}: must be {' or '.join(map(str, flag.choices))}{hint}")
    return value
