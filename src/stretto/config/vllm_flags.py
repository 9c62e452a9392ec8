"""vLLM's command line as data, so that a wrong flag is refused also where vLLM is not installed.

`vllm_flags.json` lists every long option of the supported vLLM; inference/vllm/flags.py makes it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import ConfigError

TABLE = Path(__file__).with_name("vllm_flags.json")


class Flag(msgspec.Struct, frozen=True, omit_defaults=True):
    """One long option."""

    name: str
    takes: str  # "nothing" | "value" | "values"
    choices: tuple[str, ...] = ()
    negation: str | None = None  # `--no-...` where there is one


class Table(msgspec.Struct, frozen=True):
    """All long options of one version."""

    vllm: str
    flags: tuple[Flag, ...]


@cache
def load_table() -> Table:
    return msgspec.json.decode(TABLE.read_bytes(), type=Table)


@cache
def _by_name() -> dict[str, Flag]:
    table = load_table()
    named = {flag.name: flag for flag in table.flags}
    return named | {flag.negation: flag for flag in table.flags if flag.negation}


def find(name: str, where: str) -> Flag:
    """The option of this name, `max_model_len` or `--max-model-len`.

    Raises: ConfigError naming the nearest one.
    """
    option = option_of(name)
    known = _by_name()
    if option in known:
        return known[option]
    nearest = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{where}: vLLM {load_table().vllm} has no option {option}{hint}")


def option_of(name: str) -> str:
    """`--max-model-len` of `max_model_len`, `--max_model_len` or itself."""
    return "--" + name.removeprefix("--").replace("_", "-")


def arguments(name: str, value: Any, where: str) -> list[str]:
    """The words that set an option to a value of a config; none where the value is None.

    Raises: ConfigError for an unknown option, or a value it cannot take.
    """
    flag = find(name, where)
    option = option_of(name)
    if value is None:
        return []
    if isinstance(value, bool):
        return _switch(flag, option, value, where)
    if flag.takes == "nothing":
        raise ConfigError(f"{where}: {option} is a switch and takes true or false, not {value!r}")
    if flag.takes == "values" and isinstance(value, list | tuple):
        words = [str(item) for item in value]
    else:
        words = [json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)]
    if flag.choices and (bad := [word for word in words if word not in flag.choices]):
        raise ConfigError(f"{where}: {option} takes one of {', '.join(flag.choices)}, not {bad[0]!r}")
    return [option, *words]


def _switch(flag: Flag, option: str, value: bool, where: str) -> list[str]:
    if flag.takes != "nothing":
        if {"true", "false"} <= {choice.lower() for choice in flag.choices}:
            return [option, str(value).lower()]
        raise ConfigError(f"{where}: {option} takes a value, not {str(value).lower()}")
    if value:
        return [option]
    if flag.negation is None:
        return []
    return [flag.negation]


def take_flags(words: Sequence[str], is_ours: Callable[[str], bool]) -> tuple[list[str], dict[str, Any]]:
    """Words after `inference`, parted: those of our own keys, and vLLM's options as `vllm_extra` has them.

    is_ours: says of `--data-parallel-size` whether it is a key of ours, which then counts.

    Raises: ConfigError for an option of vLLM's without its value, and for one that is nearly one.
    """
    rest: list[str] = []
    extra: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith("--") or "." in option or is_ours(option):
            rest.append(word)
            continue
        flag = _by_name().get(option_of(option))
        if flag is None:
            rest.append(word)  # whoever reads our own keys says what is wrong with it
            continue
        values = [value] if equals else []
        while flag.takes != "nothing" and queue and not queue[0].startswith("--") and queue[0] != "@":
            if values and flag.takes == "value":
                break
            values.append(queue.pop(0))
        if flag.takes != "nothing" and not values:
            raise ConfigError(f"{option}: vLLM's option takes a value; give one")
        if flag.takes == "nothing" and values:
            raise ConfigError(f"{word}: {option} of vLLM's is a switch and takes no value")
        is_off = flag.takes == "nothing" and option_of(option) != flag.name
        key = flag.name.removeprefix("--").replace("-", "_")
        many = [number(v) for v in values]
        extra[key] = not is_off if flag.takes == "nothing" else many if flag.takes == "values" else many[0]
    return rest, extra


def number(text: str) -> Any:
    """A typed value: JSON where it is some (numbers, true, {...}), else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
