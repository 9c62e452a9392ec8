"""What a flag is: one row of the table, and the settings that it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """vime's; None: not set. A switch is False."""
    help: str
    """What it means in vime."""
    state: State
    keys: tuple[str, ...] = ()
    """Keys of our config that it sets, or has a part in."""
    note: str = ""
    """equal: what does the same here. refused: why, and what to use; a value in `allowed` is taken all the same."""
    is_copied: bool = False
    """Its value goes to each of `keys` as it is."""
    choices: tuple[Any, ...] = ()
    allowed: tuple[Any, ...] = ()
    """Values that a refused flag takes, because they ask for nothing."""

    @property
    def attribute(self) -> str:
        """`actor_num_nodes` of `--actor-num-nodes`."""
        return self.name.removeprefix("--").replace("-", "_")


def acts(
    name: str,
    kind: Kind,
    default: Any,
    keys: str,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    note: str = "",
) -> Flag:
    """A flag whose value goes to our keys as it is."""
    return Flag(name, kind, default, help, "acts", tuple(keys.split()), note, True, choices)


def part(
    name: str,
    kind: Kind,
    default: Any,
    keys: str,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    note: str = "",
) -> Flag:
    """A flag that has a part in our keys; `settings` of its module says how."""
    return Flag(name, kind, default, help, "acts", tuple(keys.split()), note, False, choices)


def equal(
    name: str, kind: Kind, default: Any, note: str, help: str, *, choices: tuple[Any, ...] = ()
) -> Flag:
    """A flag that is taken and sets nothing, because what it asks for happens anyway."""
    return Flag(name, kind, default, help, "equal", (), note, False, choices)


def refused(
    name: str, kind: Kind, default: Any, note: str, help: str, *, allowed: tuple[Any, ...] = ()
) -> Flag:
    """A flag that cannot be honoured; its default asks for nothing, so it is taken."""
    own = () if default is None or kind == "switch" else (default,)
    return Flag(name, kind, default, help, "refused", (), note, False, (), (*own, *allowed))


class Values(SimpleNamespace):
    """The value of every flag, given or vime's default, as attributes."""

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, str]) -> None:
        super().__init__(**values)
        self.given = given
        """By name of the flag: the flag as it was typed, with its value."""

    def has(self, *names: str) -> bool:
        """Was one of these flags given?"""
        return any(name in self.given for name in names)


@dataclass(frozen=True)
class Setting:
    """A value for a key of our config."""

    path: str
    value: Any
    flags: tuple[str, ...] = ()
    """The flags that it follows from: what a message about it names."""


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
        import difflib

        near = difflib.get_close_matches(word, [str(each) for each in flag.choices], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{flag.name} {word}: must be {' or '.join(map(str, flag.choices))}{hint}")
    return value


def typed(flags: Values, *names: str) -> str:
    """The flags as they were typed, those that were not with vime's default."""
    return ", ".join(
        flags.given.get(name)
        or f"{name} {getattr(flags, name.removeprefix('--').replace('-', '_'))} (the default)"
        for name in names
    )
