"""Files and flags -> a checked root, or one error listing everything wrong with file and line (or the flag).

In: a root class and the words after the verb. `@ file.toml` composes left to right, `--section @ file.toml`
puts a file under a section, `--section.key value` overrides all files. Words become assignments in
arguments.py; keys unknown to the classes are found here, values are judged by pydantic, rules between keys by
checks.py. Defaults are no source: a problem between two keys names the places where somebody wrote something.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import ValidationError

from stretto.base.errors import ConfigError
from stretto.config.arguments import Assignment, FileArgument, parse_arguments
from stretto.config.positions import json_lines, toml_lines
from stretto.config.roots import RLConfig
from stretto.config.schema import Key, Path, all_paths, canonical, keys, spellings, tag_of
from stretto.config.section import Section
from stretto.config.shared import ConfigProblems, Problem, same_as, show, without_differing

Root = TypeVar("Root", bound=Section)


def load(cls: type[Root], arguments: list[str], *, verb: str = "stretto") -> Root:
    """The root that the words after a verb describe.

    Raises: ConfigError listing every problem, each with its file and line or its flag.
    """
    draft = Draft(cls)
    parsed = parse_arguments(cls, arguments)
    for problem in parsed.problems:
        draft.complain(problem.message, *map(dotted_to_path, problem.paths), source=problem.source)
    for file in parsed.files:
        draft.add_file(file)
    for assignment in sorted(parsed.assignments, key=lambda item: item.path[-1:] != ("type",)):
        draft.assign(assignment)
    root = draft.finish()
    if not isinstance(root, cls):
        raise ConfigError(draft.report(verb))
    return root


def dump(root: Section) -> dict[str, Any]:
    """A root as JSON data that loads again to an equal root, less what only steers a start (dry_run, ...)."""
    data = root.model_dump(mode="json", exclude={"dry_run", "clean"})
    return without_differing(data) if "trainer" in keys(type(root)) else data


def dump_text(root: Section) -> str:
    """The resolved config as it is written to RUN/configs/<verb>.json and printed by `--dry-run`."""
    return json.dumps(dump(root), indent=2) + "\n"


def path_to_dotted(path: Path) -> str:
    """`orchestrator.env.0.id`."""
    return ".".join(map(str, path))


def dotted_to_path(dotted: str) -> Path:
    """The inverse of path_to_dotted; numbers are list indices."""
    return tuple(int(part) if part.isdigit() else part for part in dotted.split(".")) if dotted else ()


@dataclass
class Draft:
    """Raw data on its way to a root: where each value came from, and what is wrong so far."""

    cls: type[Section]
    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[Path, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    suspects: set[Path] = field(default_factory=set)
    """Paths left out because they are wrong; problems that follow from leaving them out are not reported."""
    is_incomplete: bool = False
    """A file could not be read: what is missing may stand there."""

    def complain(self, message: str, *paths: Path, source: str | None = None) -> None:
        """Note a problem once, with the sources of its paths."""
        found = [self.source_of(path) for path in paths] if source is None else [source]
        if paths and not any(found):
            found = [self.source_near(paths[0])]
        places = ", ".join(dict.fromkeys(place for place in found if place))
        line = f"{places}: {message}" if places else message
        if line not in self.complaints:
            self.complaints.append(line)
        self.suspects.update(paths)

    def source_of(self, path: Path) -> str | None:
        """Where a path's value was given, there or under a shared key of its meaning; None: a default."""
        if path in self.sources:
            return self.sources[path]
        return next((self.sources[place] for place in self._same_as(path) if place in self.sources), None)

    def source_near(self, path: Path) -> str | None:
        """Where something in the table at a path, or the nearest table above it, was given."""
        if inside := [source for other, source in self.sources.items() if other[: len(path)] == path]:
            return inside[0]
        while path and path not in self.sources:
            path = path[:-1]
        return self.sources.get(path)

    def add_file(self, file: FileArgument) -> None:
        """Merge one file under its section."""
        loaded = read_file(file.path)
        if isinstance(loaded, str):
            self.complain(loaded, source="")
            self.is_incomplete = True
            return
        data, lines = loaded
        for part in reversed(file.prefix):
            data = {str(part): data}
        renamed: list[tuple[Path, Path]] = []
        for at, error in canonical(self.cls, data, renamed):
            line = min((n for p, n in lines.items() if (*file.prefix, *p)[: len(at)] == at), default=None)
            message = f"{path_to_dotted(at)}: {error}" if at else error
            self.complain(message, at, source=f"{file.path}:{line}" if line else file.path)
        sources = {file.prefix: file.path} if file.prefix else {}
        for path, line in lines.items():
            path = (*file.prefix, *path)
            for old, new in renamed:
                if path[: len(old)] == old:
                    path = (*new, *path[len(old) :])
            sources[path] = f"{file.path}:{line}"
        self.data = self._merge(self.cls, self.data, data, ())
        self.sources |= sources

    def _merge(self, cls: type[Section] | None, base: Any, over: Any, at: Path) -> Any:
        """`over` on `base`: tables merge, all else replaces; another `type` replaces the whole table."""
        if not (isinstance(base, dict) and isinstance(over, dict)):
            self._forget(at)
            return over
        merged = dict(base)
        for name, value in over.items():
            key = keys(cls).get(name) if cls else None
            if (
                key
                and len(key.sections) > 1
                and isinstance(value, dict)
                and isinstance(old := merged.get(name), dict)
            ):
                tag = old.get("type", key.default_tag)
                if value.get("type", tag) != tag:
                    self._forget((*at, name))
                    del merged[name]
            inner = key.sections[0] if key and len(key.sections) == 1 else None
            merged[name] = self._merge(inner, merged.get(name), value, (*at, name))
        return merged

    def _forget(self, at: Path) -> None:
        for path in [path for path in self.sources if path[: len(at)] == at and at]:
            del self.sources[path]

    def assign(self, assignment: Assignment) -> None:
        """Put the value of one flag in its place."""
        tree: Any = assignment.value
        path = assignment.path
        for depth in range(len(path) - 1, -1, -1):
            part = path[depth]
            if isinstance(part, str):
                tree = {part: tree}
                continue
            held = self._held(path[:depth])
            items = list(held) if isinstance(held, list) else []
            if part > len(items):
                known = f"has {len(items)} item{'s' * (len(items) > 1)}" if items else "is empty"
                message = f"{path_to_dotted(path[:depth])} {known}; the next index is {len(items)}"
                self.complain(message, path, source=assignment.flag)
                return
            item = self._merge(None, items[part], tree, path[: depth + 1]) if part < len(items) else tree
            tree = [*items[:part], item, *items[part + 1 :]]
        kept = dict(self.sources)
        self.data = self._merge(self.cls, self.data, tree, ())
        if any(isinstance(part, int) for part in path):
            self.sources = kept
        self.sources[path] = assignment.flag

    def _held(self, path: Path) -> Any:
        value: Any = self.data
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def finish(self) -> Section | None:
        """Judge the data; the root, or None with complaints noted.

        What is wrong is left out and the rest judged again, so that one run shows everything.
        """
        self.data = self._known(self.cls, self.data, ())
        root = None
        for _ in range(1000):
            try:
                root = self.cls.model_validate(self.data)
                break
            except ValidationError as error:
                wrong = self._judge(error)
                if not any([_remove(self.data, path) for path in sorted(wrong, key=len, reverse=True)]):
                    break
        return None if self.complaints else root

    def _known(self, cls: type[Section], data: dict[str, Any], at: Path) -> dict[str, Any]:
        """The data without unknown keys, wrong tags and values where tables belong; each is noted."""
        result: dict[str, Any] = {}
        for name, value in data.items():
            path, key = (*at, name), keys(cls).get(name)
            if key is None and name in spellings(cls):
                # An alias is still there only where it contradicts its key, which has been said.
                self.suspects.add(path)
            elif key is None:
                self.complain(f"{path_to_dotted(path)}: {self._guess(cls, name, at)}", path)
            elif key.sections and isinstance(value, dict):
                if found := key.variants(value):
                    result[name] = self._known(found[0], value, path)
                else:
                    tag, tags = value.get("type"), [tag_of(section) for section in key.sections]
                    told = f"{path_to_dotted(path)}.type = {show(tag)}: {choose_tag(tag, tags)}"
                    self.complain(told, (*path, "type"))
                    self.suspects.add(path)
            elif key.sections and not (value in (None, "None") and key.is_nullable):
                self.complain(
                    f"{path_to_dotted(path)} = {show(value)}: a table is needed: {_as_table(path, key)}", path
                )
            elif key.item_sections and isinstance(value, dict):
                self.complain(
                    f"{path_to_dotted(path)} is a list of tables; write [[{path_to_dotted(path)}]]", path
                )
            elif key.item_sections and isinstance(value, list):
                section = key.item_sections[0]
                result[name] = [
                    self._known(section, item, (*path, i)) if isinstance(item, dict) else item
                    for i, item in enumerate(value)
                ]
            elif isinstance(value, bool) and not key.accepts_bool:
                self.complain(f"{path_to_dotted(path)} = {show(value)}: {key.type_text()} is needed", path)
            else:
                result[name] = value
        return result

    def _guess(self, cls: type[Section], name: str, at: Path) -> str:
        """What an unknown key may have meant: a neighbour, another variant's key, the same key elsewhere."""
        if near := difflib.get_close_matches(name, spellings(cls), n=1):
            self.suspects.add((*at, near[0]))
            return f"unknown key; did you mean `{near[0]}`?"
        everywhere = [
            (path, owner) for path, owner, _ in all_paths(self.cls) if path.rsplit(".", 1)[-1] == name
        ]
        here = path_to_dotted(at)
        others = [tag_of(owner) for path, owner in everywhere if path == f"{here}.{name}" and tag_of(owner)]
        if others:
            return f'unknown key for type = "{tag_of(cls)}"; it belongs to type = "{others[0]}"'
        if name in ("trainer", "orchestrator", "inference") and not at:
            return f"unknown key; a file with a [{name}] section is one for `rl`"
        paths = [path for path, _ in everywhere if ".0." not in path]
        below = [path for path in paths if path.startswith(f"{here}.")]
        elsewhere = list(dict.fromkeys(below or paths))[:2]
        if elsewhere:
            self.suspects.update(map(dotted_to_path, elsewhere))
            return f"unknown key; did you mean {' or '.join(f'`{path}`' for path in elsewhere)}?"
        return f"unknown key; here are {', '.join(keys(cls))}"

    def _judge(self, error: ValidationError) -> list[Path]:
        """Note what pydantic found; the paths to leave out before judging again."""
        wrong: list[Path] = []
        found: dict[Path, list[Any]] = {}
        for item in error.errors(include_url=False):
            cause = item.get("ctx", {}).get("error")
            if isinstance(cause, ConfigProblems):
                wrong += [path for problem in cause.problems for path in self._note(problem)]
            else:
                path, key = self._locate(item["loc"])
                found.setdefault(path, []).append((item, key))
        for path, items in found.items():
            is_copy = path not in self.sources and any(other in found for other in self._same_as(path))
            wrong.append(path if is_copy or path in self.suspects else self._note_value(path, items))
        return wrong

    def _same_as(self, path: Path) -> list[Path]:
        """The places of `rl` that hold the same shared value; none for other roots."""
        return (
            [dotted_to_path(other) for other in same_as(path_to_dotted(path))] if self.cls is RLConfig else []
        )

    def _note(self, problem: Problem) -> list[Path]:
        paths = [dotted_to_path(path) for path in problem.paths]
        related = [other for path in paths for other in (path, *self._same_as(path))]
        is_follow_up = any(a[: len(b)] == b or b[: len(a)] == a for a in related for b in self.suspects)
        if not (is_follow_up or self.is_incomplete):
            self.complain(problem.message, *paths)
        return paths[1:]

    def _note_value(self, path: Path, items: list[tuple[Any, Key | None]]) -> Path:
        item, key = items[0]
        dotted = path_to_dotted(path)
        if item["type"] in ("missing", "union_tag_not_found"):
            if not self.is_incomplete:
                example = _as_table(path, key) if key and key.sections else f"`{path[-1]}`"
                self.complain(f"{dotted}: required and missing; give {example}", path)
            return path[:-1]
        message = str(item["msg"]) if key is None or not key.choices else choose(item["input"], key.choices)
        if len(items) > 1 and key:
            message = f"{key.type_text()} is needed"
        self.complain(f"{dotted} = {show(item['input'])}: {_plain(message)}", path)
        return path

    def _locate(self, location: tuple[str | int, ...]) -> tuple[Path, Key | None]:
        """The path of a pydantic location, which also holds union tags and type names, and its key."""
        path: Path = ()
        cls: type[Section] | None = self.cls
        key: Key | None = None
        tags: tuple[type[Section], ...] = ()
        for part in location:
            if tags:
                cls = next((section for section in tags if tag_of(section) == part), None)
                tags = ()
            elif isinstance(part, int):
                path += (part,)
                cls = key.item_sections[0] if key and key.item_sections else None
            elif cls is not None and part in keys(cls):
                path += (part,)
                key = keys(cls)[str(part)]
                tags = key.sections if len(key.sections) > 1 else ()
                cls = key.sections[0] if len(key.sections) == 1 else None
            else:
                break
        return path, key

    def report(self, verb: str) -> str:
        """Everything wrong, one line each."""
        count = len(self.complaints)
        lines = "\n".join(f"  {line}" for line in self.complaints)
        return f"{count} problem{'s' if count > 1 else ''} in the configuration of `{verb}`\n{lines}"


def choose(value: Any, choices: Any) -> str:
    """A rule that lists what is allowed and points at the nearest."""
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {show(near[0])}?" if near else ""
    return f"must be {' or '.join(map(show, choices))}{hint}"


def choose_tag(tag: Any, tags: list[str | None]) -> str:
    """As `choose`; of a tag that another union of `rl` has, its place is told."""
    near = difflib.get_close_matches(str(tag), [str(each) for each in tags], n=1, cutoff=0.8)
    owners = (
        path
        for path, _, key in all_paths(RLConfig)
        if ".0." not in path and tag in [tag_of(section) for section in key.sections if tag_of(section)]
    )
    owner = None if near else next(owners, None)
    if owner is None:
        return choose(tag, tags)
    return f"must be {' or '.join(map(show, tags))}; {show(tag)} belongs to {owner}.type"


def read_file(name: str) -> tuple[dict[str, Any], dict[Path, int]] | str:
    """Data of a TOML or JSON file and the line of each key; or what is wrong with it, as text."""
    path = FilePath(name).expanduser()
    if path.suffix not in (".toml", ".json"):
        return f"{name}: not a .toml or .json file"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"{name}: no such file{_nearest_file(path)}"
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        return f"{name}: cannot be read: {reason}"
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = where.group(1) if where else text.count("\n") + 1
        return f"{name}:{line}: not valid TOML: {re.sub(r' [(]at .*', '', str(error))}"
    except json.JSONDecodeError as error:
        return f"{name}:{error.lineno}: not valid JSON: {error.msg}"
    if not isinstance(data, dict):
        return f"{name}:1: the file must hold a table of keys"
    return data, (toml_lines(text) if path.suffix == ".toml" else json_lines(text))


def _nearest_file(path: FilePath) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f", and no directory {folder}"
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1)
    return f"; did you mean {folder / near[0]}?" if near else ""


def _as_table(path: Path, key: Key) -> str:
    """How a table is written, for a message."""
    tag = f'type = "{tag_of(key.sections[0])}", ' if len(key.sections) > 1 else ""
    first = next((name for name in keys(key.sections[0]) if name != "type"), "...")
    return f"[{path_to_dotted(path)}] {tag}{first} = ..."


def _plain(message: str) -> str:
    """A rule in our words: pydantic's, less what a user of TOML need not know."""
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    message = re.sub(r"^a valid dictionary.*", "a table is needed", message)
    message = re.sub(r", unable to parse string as an? \w+$", "", message)
    message = re.sub(r", got a number with a fractional part$", "", message)
    return re.sub(r"^(greater|less|a valid|a multiple|finite)", r"must be \1", message)


def _remove(data: Any, path: Path) -> bool:
    """Take a value out of nested raw data; whether there was one. An item of a list takes the list with it.

    Removing single items would shift the others away from their sources.
    """
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return False
    for part in path[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(data, dict) and data.pop(path[-1], _remove) is not _remove
