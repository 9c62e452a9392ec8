"""Reads a command line of vime: the values of flags, and options of vLLM and its router that pass through."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.flags.router import ROUTER
from stretto.config.flags.table import Program
from stretto.config.flags.vllm import VLLM
from stretto.vime.files.read import read_arguments
from stretto.vime.files.roles import read_roles
from stretto.vime.flags.flag import Flag, Setting, Values, attribute_of, listed, parse
from stretto.vime.flags.groups import BY_NAME
from stretto.vime.flags.groups.serving import MOVED

PROGRAMS = {"train.py": False, "train_async.py": True}
"""Programs of vime, which may be the first word: is training asynchronous?"""
SECRET = {"--wandb-key"}
"""Flags whose value no message repeats, since messages are copied to logs."""
THROUGH: dict[str, tuple[Program, str]] = {
    "--vllm-": (VLLM, "inference.vllm_extra"),
    "--router-": (ROUTER, "inference.router.extra"),
}


def read(words: Sequence[str]) -> tuple[Values, list[Setting]]:
    """The value of every flag, and settings for the options that pass through.

    Raises: ConfigError that lists every unknown flag, wrong value, and flag that is given twice.
    """
    queue = list(words)
    is_async = PROGRAMS[queue.pop(0)] if queue and queue[0] in PROGRAMS else False
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    passed: list[Setting] = []
    problems: list[str] = []
    while queue:
        word = queue.pop(0)
        try:
            if (flag := BY_NAME.get(word.partition("=")[0])) is not None:
                _read_flag(flag, word, queue, values, given)
            elif (prefix := next((each for each in THROUGH if word.startswith(each)), None)) is not None:
                _add(passed, _pass_through(prefix, word, queue))
            else:
                _pop_values(queue)
                raise ConfigError(_unknown(word))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(listed(problems))
    extra = _read_files(values, given, problems)
    if problems:
        raise ConfigError(listed(problems))
    every = {flag.attribute: values.get(flag.attribute, flag.default) for flag in BY_NAME.values()}
    flags = Values(every, given, BY_NAME)
    flags.is_async, flags.extra = is_async, extra
    return flags, passed


def _read_files(values: dict[str, Any], given: dict[str, str], problems: list[str]) -> dict[str, Any]:
    """Add the flags of the YAML files, as if they were typed; returns the other values of --custom-config-path."""
    extra: dict[str, Any] = {}
    for name, reader in (("--custom-config-path", read_arguments), ("--megatron-config-path", read_roles)):
        path = values.get(attribute_of(name))
        if path is None:
            continue
        try:
            found = reader(path, given[name])
        except ConfigError as error:
            problems.append(str(error))
            continue
        for key, value in found.items():
            flag = BY_NAME.get("--" + key.replace("_", "-"))
            try:
                if flag is not None:
                    _read_from_file(flag, value, f"{key}: {value} of {path}", values, given)
                elif reader is read_arguments:
                    extra[key] = value
                else:
                    raise ConfigError(f"{given[name]}: {_unknown('--' + key)}")
            except ConfigError as error:
                problems.append(str(error))
    return extra


def _read_from_file(
    flag: Flag, value: Any, source: str, values: dict[str, Any], given: dict[str, str]
) -> None:
    """Add the value of a flag in a file.

    Raises: ConfigError as for a word of the command line.
    """
    try:
        if flag.kind == "switch":
            if not isinstance(value, bool):
                raise ConfigError(f"{flag.name} {value}: true or false is needed")
            parsed: Any = value
        elif flag.kind == "object" and isinstance(value, dict):
            parsed = value
        else:
            parsed = parse(flag, [str(each) for each in value] if isinstance(value, list) else [str(value)])
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if values.setdefault(flag.attribute, parsed) != parsed:
        raise ConfigError(f"{given[flag.name]} and {source}: different values; leave one of them out")
    given.setdefault(flag.name, source)
    if flag.state == "refused" and parsed not in flag.allowed and parsed is not False:
        raise ConfigError(f"{source}: {flag.note}")


def _pop_values(queue: list[str]) -> list[str]:
    """Remove the words up to the next flag from the queue, and return them."""
    found = []
    while queue and not queue[0].startswith("--"):
        found.append(queue.pop(0))
    return found


def _read_flag(
    flag: Flag, word: str, queue: list[str], values: dict[str, Any], given: dict[str, str]
) -> None:
    _, equals, value = word.partition("=")
    following = ([value] if equals else []) + _pop_values(queue)
    typed = " ".join([flag.name, *following])
    most = {"switch": 0, "list": None, "integers": None}.get(flag.kind, 1)
    if flag.kind == "switch" and following:
        raise ConfigError(f"{typed}: a switch takes no value; write {flag.name} alone")
    if flag.kind != "switch" and not (following and all(following)):
        raise ConfigError(f"{flag.name}: needs a value")
    if most is not None and len(following) > most:
        raise ConfigError(f"{typed}: one value is needed; is a flag missing before {following[1]}?")
    parsed = parse(flag, following)
    if values.setdefault(flag.attribute, parsed) != parsed:
        raise ConfigError(
            f"{given[flag.name]} and {typed}: given twice with different values; leave one of them out"
        )
    given[flag.name] = typed
    if flag.state == "refused" and parsed not in flag.allowed:
        raise ConfigError(f"{flag.name if flag.name in SECRET else typed}: {flag.note}")


def _add(passed: list[Setting], new: Setting) -> None:
    for old in passed:
        if old.path == new.path and old.value != new.value:
            both = f"{old.flags[0]} and {new.flags[0]}"
            raise ConfigError(f"{both}: given twice with different values; leave one of them out")
    passed.append(new)


def _pass_through(prefix: str, word: str, queue: list[str]) -> Setting:
    program, table = THROUGH[prefix]
    option = word.partition("=")[0]
    name = option.removeprefix(prefix)
    before = len(queue)
    words = list(queue)
    if prefix == "--vllm-" and name in MOVED:
        _pop_values(queue)
        raise ConfigError(f"{option} is not yours to set: {MOVED[name]}; leave it out")
    if near := difflib.get_close_matches(option, BY_NAME, n=1, cutoff=0.9):
        known = "--" + name in program.by_name
        if not known:
            _pop_values(queue)
            raise ConfigError(f"{option}: unknown flag; did you mean {near[0]}?")
    try:
        program.refuse_reserved(name, option)
        value = program.parse_value(program.find(name, option), word, queue)
        program.arguments(name, value, option)
    except ConfigError:
        _pop_values(queue)
        raise
    typed = " ".join([word, *words[: before - len(queue)]])
    return Setting(f"{table}.{name.replace('-', '_')}", value, (typed,))


def _unknown(word: str) -> str:
    if not word.startswith("-"):
        return f"{word}: a flag is needed here, such as --hf-checkpoint; vime's values follow their flags"
    near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), BY_NAME, n=1)
    return f"{word}: unknown flag; " + (f"did you mean {near[0]}?" if near else "`vime --help` lists all")
