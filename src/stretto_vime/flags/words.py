"""Reads a command line of vime: the values of flags, options of vLLM and its router that pass through, and
Megatron-LM's that have no row in the table."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.flags import Program
from stretto_routers.flags import ROUTER
from stretto_vime.files.read import read_arguments
from stretto_vime.files.roles import OF_CRITIC, read_roles
from stretto_vime.flags.flag import Flag, Setting, Values, attribute_of, listed, parse
from stretto_vime.flags.groups import BY_NAME
from stretto_vime.flags.groups.serving import MOVED
from stretto_vime.flags.groups.serving import moved as moved_note
from stretto_vime.flags.others import SHIPPED, answer, program
from stretto_vllm.plan.flags import VLLM

PROGRAMS = {"train.py": False, "train_async.py": True}
"""Programs of vime, which may be the first word, with a directory: is training asynchronous?"""
SECRET = {"--wandb-key"}
"""Flags whose value no message repeats, since messages are copied to logs."""
THROUGH: dict[str, tuple[Program, str]] = {
    "--vllm-": (VLLM, "inference.vllm_extra"),
    "--router-": (ROUTER, "inference.router.extra"),
}


def read(words: Sequence[str]) -> tuple[Values, list[Setting]]:
    """The value of every flag, and settings for the options that pass through.

    A flag of a file wins over one that was typed, and the last of two over the first; a note says so.

    Raises: ConfigError that lists every unknown flag and wrong value.
    """
    queue = list(words)
    is_async = PROGRAMS[Path(queue.pop(0)).name] if queue and Path(queue[0]).name in PROGRAMS else False
    found = _Found()
    passed: list[Setting] = []
    moved: list[tuple[str, Any, str]] = []
    problems: list[str] = []
    while queue:
        word = queue.pop(0)
        try:
            if (flag := BY_NAME.get(word.partition("=")[0])) is not None:
                _read_flag(flag, word, queue, found)
            elif (prefix := next((each for each in THROUGH if word.startswith(each)), None)) is not None:
                name, setting = _pass_through(prefix, word, queue)
                if prefix == "--vllm-" and name in MOVED:
                    moved.append((name, setting.value, setting.flags[0]))
                else:
                    _add(passed, setting, found.notes)
            elif _is_of_megatron(word):
                _read_other(word, queue, found)
            else:
                _pop_values(queue)
                raise ConfigError(_unknown(word))
        except ConfigError as error:
            problems.append(str(error))
    extra = _read_files(found, problems)
    if problems := [*problems, *found.refusals.values()]:
        raise ConfigError(listed(problems))
    every = {flag.attribute: found.values.get(flag.attribute, flag.default) for flag in BY_NAME.values()}
    flags = Values(every, found.given, BY_NAME)
    _read_moved(flags, moved, found.notes)
    flags.is_async, flags.extra, flags.overridden = is_async, found.others | extra, found.notes
    flags.critic = found.critic
    return flags, passed


def _read_moved(flags: Values, moved: list[tuple[str, Any, str]], notes: list[str]) -> None:
    """A note about every option of vLLM that another flag sets to the same value.

    Raises: ConfigError that lists those with another value.
    """
    problems = []
    for name, value, typed in moved:
        try:
            notes.append(moved_note(flags, name, value, typed))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(listed(problems))


class _Found:
    """The flags that were read so far."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """By attribute."""
        self.given: dict[str, str] = {}
        """By name: the flag as it was typed, or the place of a file that has it."""
        self.refusals: dict[str, str] = {}
        """By name: why the value is refused. A later value may be accepted."""
        self.critic: dict[str, tuple[Any, str]] = {}
        """Values that a file has for the critic alone, by attribute, each with its place."""
        self.notes: list[str] = []
        """Which values were replaced by later ones, and which do nothing."""
        self.others: dict[str, Any] = {}
        """Values of Megatron-LM's other options by attribute, for functions of the user that read `args`."""

    def add(self, flag: Flag, value: Any, source: str) -> None:
        """Add a value; it replaces an earlier one. A function of slime's is vime's of the same name."""
        if isinstance(value, str) and flag.name.endswith("-path") and value.startswith("slime."):
            value = value.replace("slime.", "vime.", 1).replace("sglang_rollout", "vllm_rollout")
        old = self.values.get(flag.attribute, value)
        if old != value:
            self.notes.append(f"{self.given[flag.name]} is not used: {source} comes after it")
        self.values[flag.attribute], self.given[flag.name] = value, source
        self.refusals.pop(flag.name, None)
        if flag.state == "refused" and value is not False and value not in flag.allowed:
            self.refusals[flag.name] = f"{source}: {flag.note}"


def _read_files(found: _Found, problems: list[str]) -> dict[str, Any]:
    """Add the flags of the YAML files; returns the other values of --custom-config-path."""
    extra: dict[str, Any] = {}
    for name, reader in (("--custom-config-path", read_arguments), ("--megatron-config-path", read_roles)):
        path = found.values.get(attribute_of(name))
        if path is None:
            continue
        where = found.given[name]
        try:
            read_values = reader(path, where)
        except ConfigError as error:
            problems.append(str(error))
            continue
        for key, value in read_values.items():
            name = key.removeprefix(OF_CRITIC)
            flag = BY_NAME.get("--" + name.replace("_", "-"))
            try:
                if flag is not None and name != key:
                    source = f"{name}: {value} of the critic in {path}"
                    found.critic[name] = (_value_of_file(flag, value, source), source)
                elif flag is not None:
                    _read_from_file(flag, value, f"{key}: {value} of {path}", found)
                elif _is_of_megatron("--" + name.replace("_", "-")):
                    _add_other("--" + name.replace("_", "-"), value, f"{name}: {value} of {path}", found)
                elif reader is read_arguments:
                    extra[key] = value
                else:
                    raise ConfigError(f"{where}: {_unknown('--' + name)}")
            except ConfigError as error:
                problems.append(str(error))
    return extra


def _value_of_file(flag: Flag, value: Any, source: str) -> Any:
    """The value of a flag in a file.

    Raises: ConfigError as for a word of the command line.
    """
    try:
        if flag.kind == "switch":
            if not isinstance(value, bool):
                raise ConfigError(f"{flag.name} {value}: true or false is needed")
            return value
        if flag.kind == "object" and isinstance(value, dict):
            return value
        return parse(flag, [str(each) for each in value] if isinstance(value, list) else [str(value)])
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read_from_file(flag: Flag, value: Any, source: str, found: _Found) -> None:
    """Add the value of a flag in a file, which replaces one that was typed.

    Raises: ConfigError as for a word of the command line.
    """
    parsed = _value_of_file(flag, value, source)
    if flag.name in SECRET:
        source = f"{flag.name} of a file"
    if flag.name not in found.given or found.values[flag.attribute] != parsed:
        found.add(flag, parsed, source)


def _pop_values(queue: list[str]) -> list[str]:
    """Remove the words up to the next flag from the queue, and return them."""
    found = []
    while queue and not queue[0].startswith("--"):
        found.append(queue.pop(0))
    return found


def _read_flag(flag: Flag, word: str, queue: list[str], found: _Found) -> None:
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
    found.add(flag, parse(flag, following), flag.name if flag.name in SECRET else typed)


def _is_of_megatron(word: str) -> bool:
    """Is a word an option of Megatron-LM's? The list of one on PYTHONPATH is asked for here, which takes seconds."""
    return word.startswith("--") and word.partition("=")[0] in program()[0].by_name


def _read_other(word: str, queue: list[str], found: _Found) -> None:
    """Read an option of Megatron-LM's that has no row of its own.

    Raises: ConfigError for a value that it cannot have, or that would change what is learned.
    """
    megatron, option, words = program()[0], word.partition("=")[0], list(queue)
    flag = megatron.by_name[option]
    try:
        value = megatron.parse_value(flag, word, queue)
    except ConfigError:
        _pop_values(queue)
        raise
    _add_other(option, value, " ".join([word, *words[: len(words) - len(queue)]]), found)


def _add_other(option: str, value: Any, typed: str, found: _Found) -> None:
    megatron, said = program()
    megatron.arguments(option, value, typed)
    if said is not None and said not in found.notes:
        found.notes.append(said)
    found.refusals.pop(option, None)
    try:
        note = answer(megatron.by_name[option], option, value, typed)
    except ConfigError as error:
        found.refusals[option] = str(error)  # a later value may be accepted
        return
    found.others[attribute_of(option)] = value
    found.notes += [] if note is None else [note]


def _add(passed: list[Setting], new: Setting, notes: list[str]) -> None:
    """Add a setting; it replaces an earlier one of the same key."""
    for old in [each for each in passed if each.path == new.path]:
        passed.remove(old)
        if old.value != new.value:
            notes.append(f"{old.flags[0]} is not used: {new.flags[0]} comes after it")
    passed.append(new)


def _pass_through(prefix: str, word: str, queue: list[str]) -> tuple[str, Setting]:
    """The name of an option of vLLM or its router, and the setting that it makes.

    Raises: ConfigError for an option that is none, is reserved, or has another kind of value.
    """
    program, table = THROUGH[prefix]
    option = word.partition("=")[0]
    name = option.removeprefix(prefix)
    before = len(queue)
    words = list(queue)
    if "--" + name not in program.by_name:
        _pop_values(queue)
        known = [*BY_NAME, *(prefix + each.removeprefix("--") for each in program.by_name)]
        near = nearest(option.replace("_", "-"), known, ours=prefix)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{option}: {program.name} {program.table.version} has no option --{name}{hint}")
    try:
        if not (prefix == "--vllm-" and name in MOVED):
            program.refuse_reserved(name, option)
        value = program.parse_value(program.find(name, option), word, queue)
        program.arguments(name, value, option)
    except ConfigError:
        _pop_values(queue)
        raise
    typed = " ".join([word, *words[: before - len(queue)]])
    return name, Setting(f"{table}.{name.replace('-', '_')}", value, (typed,))


def _unknown(word: str) -> str:
    if not word.startswith("-"):
        return f"{word}: a flag is needed here, such as --hf-checkpoint; vime's values follow their flags"
    near = nearest(word.partition("=")[0].replace("_", "-"), [*BY_NAME, *SHIPPED.by_name])
    return f"{word}: unknown flag; " + (f"did you mean {near}?" if near else "`vime --help` lists all")


def nearest(name: str, known: Iterable[str], ours: str = "--") -> str | None:
    """The known flag that a misspelt one may have meant; None if none is near.

    ours: the beginning that all have, which makes no two flags alike.
    """
    word = name.removeprefix(ours)
    among = [each.removeprefix(ours) for each in known if each.startswith(ours)]
    near = [each for each in difflib.get_close_matches(word, among, n=5) if _is_near(word, each)]
    found = min(near, key=lambda each: _distance(word, each), default=None)
    return None if found is None else ours + found


def _is_near(word: str, other: str) -> bool:
    """Is each part of one flag that of the other but for a third of its letters, or are they alike without hyphens?"""
    parts = list(zip(word.split("-"), other.split("-")))
    is_aligned = word.count("-") == other.count("-")
    if is_aligned and all(_is_near_part(*part) for part in parts):
        return True
    joined = (word.replace("-", ""), other.replace("-", ""))
    return 12 * _distance(*joined) <= max(map(len, joined))


def _is_near_part(word: str, other: str) -> bool:
    """Do at most a third of the letters differ, or does one of the two shorten the other, as `len` does `length`?"""
    short, long = sorted((word, other), key=len)
    return 3 * _distance(word, other) <= len(long) or (len(short) > 2 and long.startswith(short))


def _distance(left: str, right: str) -> int:
    """How many letters must be inserted, removed or replaced to make one word of the other."""
    row = [*range(len(right) + 1)]
    for count, letter in enumerate(left, start=1):
        before, row[0] = row[0], count
        for at, other in enumerate(right, start=1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (letter != other))
    return row[-1]
