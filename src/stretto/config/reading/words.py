"""From the words after a verb to files to read and values to set.

Grammar: `@ file`, `--section @ file`, `--key value`, `--key=value`, `--flag`, `--no-flag`, `--section` (turns
an optional section on), `--no-section` (off), `--list a b`, `--list '[1, 2]'`, `--ids 0,1`, `--table '{"a":
1}'`, `--key None`, `--list.0.key value`. Dashes and underscores in keys are the same. Values are
validated later (draft.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config.lookup import unread
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.section import Key, KeyPath, Section, all_paths, dotted, find, members, suggest
from stretto.config.synonyms import keys_meant


@dataclass(frozen=True)
class FileArgument:
    """A file and the section that it fills."""

    prefix: KeyPath
    path: str


@dataclass(frozen=True)
class Assignment:
    """A value given by a flag: the path as typed, the value, and the whole flag."""

    path: KeyPath
    value: Any
    flag: str


@dataclass(frozen=True)
class ArgumentProblem:
    """Words that cannot be understood."""

    message: str
    source: str
    paths: tuple[KeyPath, ...] = ()
    """Keys that they may mean."""
    is_file: bool = False
    """Whether they name a file that is therefore not read."""


_FAR = 2  # a key that is deeper than what was written by more than this is not what was meant
FILE_WORDS = ("config", "file", "config-file", "config_file", "c", "f", "cfg", "config-path", "config_path")
SET_WORDS = ("set", "override", "overrides", "param", "o", "opt", "option")
"""Flags by which other programs take a file, and a key with its value."""
Argument = FileArgument | Assignment | ArgumentProblem


@dataclass(frozen=True)
class Target:
    """The key that a flag's name leads to; None in a table in which users choose the keys."""

    path: KeyPath
    """As written."""
    key: Key | None
    is_negated: bool = False
    is_foreign: bool = False
    """Whether it is a key of another framework, which the loader refuses or ignores, depending on its value."""


@dataclass(frozen=True)
class Part:
    """A section whose keys are also flags by their own names, unless the whole has a key of that name."""

    name: str
    cls: type[Section]


def parse_arguments(cls: type[Section], words: list[str], part: Part | None = None) -> list[Argument]:
    """The arguments that the words form, in their order; no file is read and no value validated."""
    rest = list(words)
    found = []
    while rest:
        found.append(_next_argument(cls, rest, part))
    return found


def _next_argument(cls: type[Section], rest: list[str], part: Part | None) -> Argument:
    word = rest.pop(0)
    if word.startswith("@"):
        return _file((), word, rest)
    if not word.startswith("--") or word == "--":
        return _stray(cls, word, rest)
    name, equals, value = word[2:].partition("=")
    target = _resolve(cls, name)
    if isinstance(target, ArgumentProblem) and part is not None and isinstance(_resolve(part.cls, name), Target):
        target = _resolve(cls, f"{part.name}.{name}")
    if isinstance(target, ArgumentProblem):
        following = [] if equals else _up_to_next(rest)
        del rest[: len(following)]
        given = [value] if equals else following[:1]
        is_file = bool(given) and given[0].endswith((".toml", ".json")) and name in FILE_WORDS
        message = f"unknown flag; a file is given as `@ {given[0]}`" if is_file else target.message
        if name in SET_WORDS and given and "=" in given[0]:
            name, _, value = given[0].partition("=")
            message = f"unknown flag; a key is a flag itself: --{name.replace('_', '-')} {value}"
        return ArgumentProblem(message, " ".join([word, *following[:1]]), target.paths, is_file)
    key = target.key
    if target.is_negated:
        assert key is not None
        if equals:
            return ArgumentProblem("takes no value", word)
        return Assignment(target.path, False if bool in key.members else None, word)
    if key is not None and key.sections and not equals and rest and rest[0].startswith("@"):
        return _file(target.path, rest.pop(0), rest)
    if equals:
        return _assignment(target, [value], word)
    given = _up_to_next(rest)
    if key is not None and key.is_bool:
        if given and "=" not in given[0] and given[0].lower() not in ("true", "false") and "." not in given[0]:
            del rest[:1]
            return ArgumentProblem(f"takes no value but true or false; off is --no-{name}", f"{word} {given[0]}")
        given = [each for each in given[:1] if each.lower() in ("true", "false")]
    elif key is None or not key.is_list:
        given = given[:1]
    del rest[: len(given)]
    if given:
        return _assignment(target, given, " ".join([word, *given]))
    if target.is_foreign or (key is not None and (bool in key.members or key.sections)):
        is_true = key is None or bool in key.members
        return Assignment(target.path, True if is_true else {}, word)
    wanted = f", {key.type_text()}" if key is not None else ""
    return ArgumentProblem(f"a value must follow{wanted}", word)


def _stray(cls: type[Section], word: str, rest: list[str]) -> ArgumentProblem:
    """The problem of a word that is neither a flag nor a file; the value that follows it is a part of it."""
    if word.endswith((".toml", ".json")):
        return ArgumentProblem(f"unexpected word; a file is given as `@ {word}`", word, is_file=True)
    name, equals, value = word.lstrip("-\u2013\u2014").partition("=")
    dashes = len(word) - len(word.lstrip("-\u2013\u2014"))
    if dashes and not name and rest and not rest[0].startswith(("-", "@")):
        name, equals, value = rest.pop(0).partition("=")
        word = f"{word} {name}{equals}{value}"
    given = [value] if equals else (_up_to_next(rest)[:1] if dashes else [])
    if dashes and not equals:
        del rest[: len(given)]
    hint = "keys are given as --key value"
    known = find(cls, [part.replace("-", "_") for part in name.split(".")])
    near = [known.path] if known.is_known else suggest(cls, tuple(name.replace("-", "_").split(".")))
    if (equals or dashes) and near:
        hint += f"; did you mean {' '.join([f'--{dotted(near[0])}'.replace('_', '-'), *given])}?"
    elif dashes:
        hint += ", with two dashes (-)"
    return ArgumentProblem(f"unexpected word; {hint}", " ".join([word, *given]) if not equals else word)


def _assignment(target: Target, words: list[str], flag: str) -> Assignment:
    """The words as the target's value; a text for a section is that of its class's SHORT key."""
    value = read_value(target.key, words)
    sections = target.key.sections if target.key is not None else ()
    short = next((str(section.SHORT) for section in sections if hasattr(section, "SHORT")), None)
    if isinstance(value, str) and short is not None:
        return Assignment((*target.path, short), value, flag)
    return Assignment(target.path, value, flag)


def _file(prefix: KeyPath, word: str, rest: list[str]) -> FileArgument | ArgumentProblem:
    name = word[1:] or (rest.pop(0) if rest and not rest[0].startswith("--") else "")
    missing = ArgumentProblem("a file name must follow, as in `@ rl.toml`", "@")
    return FileArgument(prefix, name) if name else missing


def _up_to_next(rest: list[str]) -> list[str]:
    """The words up to the next flag or file."""
    is_end = [word.startswith("@") or (word.startswith("--") and word != "--") for word in rest]
    return rest[: [*is_end, True].index(True)]


def read_value(key: Key | None, words: list[str]) -> Any:
    """Words as a raw value of the key's type; what does not fit stays text, for validation."""
    text = words[0]
    if len(words) == 1 and text == "None" and (key is None or key.is_nullable):
        return None
    if key is None:
        return _json_or_text(text)
    if not key.is_list:
        is_text = any(member in (str, Path) for member in key.members) or bool(key.choices)
        return text if is_text else _json_or_text(text)
    if len(words) == 1 and text.lstrip().startswith("["):
        return _json_or_text(text)
    if len(words) == 1 and str in key.members:
        return text
    if any(str in members(part) for member in key.members for part in getattr(member, "__args__", ())):
        return words
    if any("," in word for word in words):
        words = [word for word in ",".join(words).split(",") if word]
    return [_json_or_text(word) for word in words]


def _json_or_text(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except ValueError:
        return text


def _resolve(cls: type[Section], name: str) -> Target | ArgumentProblem:
    """The target of a flag's dotted name, or a problem with the names that it may mean."""
    parts = name.split(".")
    plain = [part.replace("-", "_") for part in parts]
    # Keys that users choose stay as they are typed; arguments of a function have no hyphen.
    parts = [plain[i] if i and plain[i - 1] == "args" else part for i, part in enumerate(parts)]
    if (target := _target(cls, plain, parts)) is not None:
        return target
    for index in {0, len(plain) - 1}:
        positive = [part.removeprefix("no_") if i == index else part for i, part in enumerate(plain)]
        target = None if positive == plain else _target(cls, positive, parts)
        if target is not None and target.key is not None:
            if bool in target.key.members or target.key.is_nullable:
                return Target(target.path, target.key, is_negated=True)
            message = f"`{'.'.join(positive)}` cannot be turned off; it takes {target.key.type_text()}"
            return ArgumentProblem(message, "")
    for index in range(1, len(plain)):
        first = [*plain[:index], "0", *plain[index:]]
        if (target := _target(cls, first, first)) is not None and target.key is not None:
            flag = ".".join([*parts[:index], "0", *parts[index:]])
            message = f"unknown flag; `{'.'.join(plain[:index])}` is a list, its first item is 0: --{flag}"
            return ArgumentProblem(message, "", (target.path,))
    meant = {tuple(key.split(".")) for key in keys_meant(".".join(plain))}
    near = [path for path in suggest(cls, tuple(plain)) if len(path) <= len(plain) + _FAR or path in meant]
    if beside := _beside(cls, plain):  # then a key of another name is no near one
        near = [path for path in near if path in meant or not _is_beside(path, plain)]
    flags = " or ".join("--" + dotted(path).replace("_", "-") for path in near)
    hint = f"did you mean {flags}?" if near else beside or _help_hint(name)
    if (other := _other_verb(cls, plain)) is not None:
        return ArgumentProblem(f"unknown flag; it is one of `{other}`", "")
    return ArgumentProblem(f"unknown flag; {hint}{unread()}", "", tuple(find(cls, path).path for path in near))


def _other_verb(cls: type[Section], parts: list[str]) -> str | None:
    """The verb that has a key in a section which this one has nowhere; None if there is none."""
    if len(parts) < 2 or any(parts[0] in path.split(".") for path, _, _ in all_paths(cls)):
        return None
    return next((verb for verb, root in (("rl", RLConfig), ("sft", SFTConfig)) if find(root, parts).is_known), None)


def _help_hint(name: str) -> str:
    """Where to find a flag that is like none."""
    import difflib

    if difflib.get_close_matches(name, ("help",), n=1):
        return "did you mean --help?"
    return "`--help WORD` searches names and meanings, `--help all` lists them"


def _beside(cls: type[Section], parts: list[str]) -> str:
    """The keys of the section that a flag names, if there is that section; "" otherwise."""
    level = tuple(parts[:-1])
    paths = [tuple(path.split(".")) for path, _, _ in all_paths(cls)]
    names = dict.fromkeys(path[-1] for path in paths if path[:-1] == level)
    return f"--{dotted(level).replace('_', '-')} has {', '.join(names)}" if level and names else ""


def _is_beside(path: KeyPath, parts: list[str]) -> bool:
    """Whether a path is the section that a flag names, or a key of it with quite another name."""
    import difflib

    level = tuple(parts[:-1])
    is_like = bool(difflib.get_close_matches(str(path[-1]), parts[-1:]))
    return path == level or (path[:-1] == level and not is_like)


def _target(cls: type[Section], parts: list[str], raw: list[str]) -> Target | None:
    found = find(cls, parts)
    written = tuple(int(part) if part.isdigit() else part for part in parts)
    if found.is_known:
        return Target(written, found.key)
    if found.row is not None and (found.row.is_refused or found.row.ours == ""):
        return Target(written, None, is_foreign=True)
    if found.key is None or not found.key.is_free_table:
        return None
    if found.is_row_whole:
        return Target(written, None)
    chosen = 1 if found.key.inner_sections else len(found.rest)  # of tables by name only the name is the user's
    start = len(parts) - len(found.rest)
    return Target((*written[:start], *raw[start : start + chosen], *written[start + chosen :]), None)
