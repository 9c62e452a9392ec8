"""Command lines of other programs as data, so that options are checked without the program."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import ConfigError
from stretto.config.section import show

KINDS = {"integer": "an integer", "number": "a number"}


class Flag(msgspec.Struct, frozen=True, omit_defaults=True):
    """One long option."""

    name: str
    takes: str  # "nothing" | "value" | "values"
    choices: tuple[str, ...] = ()
    negation: str | None = None  # `--no-...` where there is one
    kind: str = "text"  # "text" | "integer" | "number"
    default: Any = None  # what it is without the option, where that is known


class Table(msgspec.Struct, frozen=True):
    """All long options of one version."""

    version: str
    flags: tuple[Flag, ...]


def table_text(table: Table) -> str:
    """A table as its file holds it: JSON, one option per line."""
    lines = ",\n".join(msgspec.json.encode(flag).decode() for flag in table.flags)
    return f'{{"version": "{table.version}", "flags": [\n{lines}\n]}}\n'


def option_of(name: str) -> str:
    """`--max-model-len` of `max_model_len`, `--max_model_len` or itself."""
    return "--" + name.removeprefix("--").replace("_", "-")


def number(text: str) -> Any:
    """A typed value: parsed as JSON (numbers, true, {...}) if possible, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Program:
    """A program whose options a config passes through."""

    name: str
    file: Path
    """Its table, as JSON."""
    reserved: dict[str, str]
    """Options that are not the user's to set, and why."""

    @cached_property
    def table(self) -> Table:
        return msgspec.json.decode(self.file.read_bytes(), type=Table)

    @cached_property
    def by_name(self) -> dict[str, Flag]:
        named = {flag.name: flag for flag in self.table.flags}
        return named | {flag.negation: flag for flag in self.table.flags if flag.negation}

    def refuse_reserved(self, name: str, where: str) -> None:
        """Raises: ConfigError if the option is not the user's to set."""
        if (reason := self.reserved.get(option_of(name))) is not None:
            raise ConfigError(f"{where} is not yours to set: {reason}; leave it out")

    def find(self, name: str, where: str) -> Flag:
        """The option of this name, `max_model_len` or `--max-model-len`.

        Raises: ConfigError naming the nearest one.
        """
        if (flag := self.by_name.get(option_of(name))) is not None:
            return flag
        import difflib

        nearest = difflib.get_close_matches(option_of(name), self.by_name, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"{where}: {self.name} {self.table.version} has no option {option_of(name)}{hint}")

    def arguments(self, name: str, value: Any, where: str) -> list[str]:
        """The words that set an option to a value of a config; none if the value is None.

        Raises: ConfigError for an unknown option, or a value it cannot take.
        """
        flag, option = self.find(name, where), option_of(name)
        if value is None:
            return []
        if flag.takes == "nothing":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}: {option} is a switch and takes true or false, not {value!r}")
            return [option] if value else [flag.negation] if flag.negation else []
        if isinstance(value, bool):
            if not {"true", "false"} <= {choice.lower() for choice in flag.choices}:
                raise ConfigError(f"{where}: {option} takes a value, not {str(value).lower()}")
            return [option, str(value).lower()]
        items = value if flag.takes == "values" and isinstance(value, list | tuple) else [value]
        words = [json.dumps(item) if isinstance(item, dict | list | tuple) else str(item) for item in items]
        if bad := [word for word in words if flag.choices and word not in flag.choices]:
            raise ConfigError(f"{where}: {option} takes one of {', '.join(flag.choices)}, not {bad[0]!r}")
        if flag.kind in KINDS and not all(_is_number(word, flag.kind) for word in words):
            raise ConfigError(f"{where}: {option} takes {KINDS[flag.kind]}, not {show(value)}")
        return [option, *words]

    def parse_value(self, flag: Flag, word: str, rest: list[str]) -> Any:
        """The value that a word gives its option; the words of the value are removed from `rest`.

        Raises: ConfigError for a value too many or too few.
        """
        option, equals, value = word.partition("=")
        values = [value] if equals else []
        most = {"nothing": 0, "value": 1}.get(flag.takes, len(rest))
        while len(values) < most and rest and not rest[0].startswith(("--", "@")):
            values.append(rest.pop(0))
        if bool(values) == (flag.takes == "nothing"):
            message = "is a switch and takes no value" if values else "takes a value; give one"
            raise ConfigError(f"{option}: this option of {self.name} {message}")
        if flag.takes == "nothing":
            return option_of(option) != flag.negation
        found = [number(each) for each in values]
        return found if flag.takes == "values" else found[0]


def _is_number(text: str, kind: str) -> bool:
    try:
        found = float(text)
    except ValueError:
        return False
    return math.isfinite(found) and (kind == "number" or found.is_integer())
