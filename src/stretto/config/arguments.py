"""The words after a verb -> files to read and values to set.

Grammar: `@ file`, `--section @ file`, `--key value`, `--key=value`, `--flag`, `--no-flag`, `--section` (turns
an optional section on), `--no-section` (off), `--list a b`, `--list '[1, 2]'`, `--ids 0,1`, `--table '{"a":
1}'`, `--key None`, `--list.0.key value`. Dashes and underscores in keys are the same. Whether values are
right is judged later (load.py).
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import Any

from stretto.config.schema import Key, Path, all_paths, keys, spellings
from stretto.config.section import Section, all_aliases, members


@dataclass(frozen=True)
class FileArgument:
    """A file and the section that it fills."""

    prefix: Path
    path: str


@dataclass(frozen=True)
class Assignment:
    """A value given by a flag, and the flag as it was typed."""

    path: Path
    value: Any
    flag: str


@dataclass(frozen=True)
class ArgumentProblem:
    """Words that mean nothing."""

    message: str
    source: str
    paths: tuple[str, ...] = ()


@dataclass
class Arguments:
    """What the words say, in their order."""

    files: list[FileArgument] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[ArgumentProblem] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """What a flag's name points at; `key` is None inside a table with keys of the user's own."""

    path: Path
    key: Key | None
    is_negated: bool = False


def parse_arguments(cls: type[Section], words: list[str]) -> Arguments:
    """Sort the words; nothing is read or checked against types yet."""
    result = Arguments()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            _take_file(result, (), word, rest)
        elif word.startswith("--") and len(word) > 2:
            _take_flag(cls, result, word, rest)
        else:
            hint = f"; a file is given as `@ {word}`" if word.endswith((".toml", ".json")) else ""
            result.problems.append(
                ArgumentProblem(f"unexpected word{hint or '; keys are given as --key value'}", word)
            )
    return result


def _take_file(result: Arguments, prefix: Path, word: str, rest: list[str]) -> None:
    name = word[1:] or (rest.pop(0) if rest and not rest[0].startswith("--") else "")
    if name:
        result.files.append(FileArgument(prefix, name))
    else:
        result.problems.append(ArgumentProblem("a file name must follow, as in `@ rl.toml`", "@"))


def _take_flag(cls: type[Section], result: Arguments, word: str, rest: list[str]) -> None:
    name, has_value, value = word[2:].partition("=")
    target = resolve(cls, name)
    if isinstance(target, str):
        following = [] if has_value else _following(rest)
        shown = " ".join([word, *following[:1]])
        meant = resolve_path(cls, target)
        result.problems.append(ArgumentProblem(target, shown, (meant,) if meant else ()))
        del rest[: len(following)]
        return
    is_section = target.key is not None and bool(target.key.sections) and not target.is_negated
    if is_section and not has_value and rest and rest[0].startswith("@"):
        _take_file(result, target.path, rest.pop(0), rest)
        return
    _take_value(result, target, word, [value] if has_value else None, rest)


def _take_value(
    result: Arguments, target: Target, word: str, given: list[str] | None, rest: list[str]
) -> None:
    key = target.key
    if target.is_negated:
        assert key is not None
        if given is not None:
            result.problems.append(ArgumentProblem("takes no value", word))
        result.assignments.append(Assignment(target.path, False if key.is_bool else None, word))
        return
    words = given if given is not None else _following(rest)
    is_bare = given is None and not words
    if key is not None and key.is_bool and given is None:
        words = [w for w in words[:1] if w.lower() in ("true", "false")]
        is_bare = not words
    elif key is None or not key.is_list:
        words = words[:1]
    if given is None:
        del rest[: len(words)]
    shown = " ".join([word, *words]) if given is None else word
    if not is_bare:
        result.assignments.append(Assignment(target.path, read_value(key, words), shown))
    elif key is not None and (key.is_bool or key.sections):
        result.assignments.append(Assignment(target.path, True if key.is_bool else {}, shown))
    else:
        result.problems.append(ArgumentProblem("a value must follow", word))


def _following(rest: list[str]) -> list[str]:
    """The words up to the next flag or file."""
    end = next(
        (i for i, w in enumerate(rest) if w.startswith("@") or (w.startswith("--") and len(w) > 2)), len(rest)
    )
    return rest[:end]


def read_value(key: Key | None, words: list[str]) -> Any:
    """Words as a raw value of the key's type; what does not fit is left as text for the judge."""
    text = words[0]
    if len(words) == 1 and text == "None" and (key is None or key.is_nullable):
        return None
    if key is None:
        return _json_or_text(text)
    if key.is_list:
        if len(words) == 1 and text.lstrip().startswith("["):
            return _json_or_text(text)
        if any(member is str for member in key.members) and len(words) == 1:
            return text
        if not any(item is str for member in key.members for item in _items(member)) and "," in "".join(
            words
        ):
            words = [word for word in ",".join(words).split(",") if word]
        is_text = any(item is str for member in key.members for item in _items(member))
        return [word if is_text else _json_or_text(word) for word in words]
    return text if key.accepts_text else _json_or_text(text)


def _items(member: Any) -> tuple[Any, ...]:
    return tuple(item for argument in getattr(member, "__args__", ()) for item in members(argument))


def _json_or_text(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except ValueError:
        return text


def resolve(cls: type[Section], name: str) -> Target | str:
    """What a flag's dotted name points at, or a message with the nearest name that exists."""
    parts = name.split(".")
    plain = [part.replace("-", "_") for part in parts]
    if (target := _walk(cls, plain, parts)) is not None:
        return target
    for index in {0, len(plain) - 1}:
        if plain[index].startswith("no_"):
            positive = [part.removeprefix("no_") if i == index else part for i, part in enumerate(plain)]
            target = _walk(cls, positive, parts)
            if target and target.key and (target.key.is_bool or target.key.is_nullable):
                return Target(target.path, target.key, is_negated=True)
            if target and target.key:
                return f"`{'.'.join(positive)}` cannot be turned off; it takes {target.key.type_text()}"
    return _guess(cls, plain)


def _walk(cls: type[Section], parts: list[str], raw: list[str]) -> Target | None:
    candidates: tuple[type[Section], ...] = (cls,)
    path: Path = ()
    key: Key | None = None
    while parts:
        if key is not None and key.is_free_table:
            return Target((*path, *raw[-len(parts) :]), None)
        if key is not None and key.item_sections and parts[0].isdigit():
            path, candidates, parts, key = (*path, int(parts[0])), key.item_sections, parts[1:], None
            continue
        parts = _without_alias(candidates, parts)
        key = next((keys(c)[parts[0]] for c in candidates if parts[0] in keys(c)), None)
        if key is None:
            return None
        path, candidates, parts = (*path, parts[0]), key.sections, parts[1:]
    return Target(path, key) if key is not None else None


def _without_alias(candidates: tuple[type[Section], ...], parts: list[str]) -> list[str]:
    for section in candidates:
        for alias, target in all_aliases(section).items():
            old = alias.split(".")
            if parts[: len(old)] == old:
                return target.split(".") + parts[len(old) :]
    return parts


def _guess(cls: type[Section], plain: list[str]) -> str:
    known = {path: path for path, _, _ in all_paths(cls)}
    *above, last = plain
    level = ".".join(above)
    neighbours = [path for path in known if path.rpartition(".")[0] == level]
    names = {path.rpartition(".")[2]: path for path in neighbours}
    if not above:
        names |= {alias: alias for alias in spellings(cls)}
    if near := difflib.get_close_matches(last, names, n=1):
        return f"unknown flag; did you mean {_flag(names[near[0]])}?"
    same = [path for path in known if path.endswith("." + ".".join(plain))]
    same = same or [path for path in known if path.rpartition(".")[2] == last and ".0." not in path]
    if same:
        return f"unknown flag; did you mean {' or '.join(map(_flag, same[:2]))}?"
    if near := difflib.get_close_matches(".".join(plain), known, n=1, cutoff=0.7):
        return f"unknown flag; did you mean {_flag(near[0])}?"
    return "unknown flag; --help lists all"


def resolve_path(cls: type[Section], message: str) -> str | None:
    """The path of the flag that a message suggests."""
    _, _, flag = message.partition("did you mean --")
    target = resolve(cls, flag.split("?")[0].split(" ")[0]) if flag else None
    return ".".join(map(str, target.path)) if isinstance(target, Target) else None


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")
