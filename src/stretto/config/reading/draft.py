"""Collects the values of files and flags, and builds a root or reports every mistake.

In: values of files and flags, in any spelling (`Draft.add_file`, `assign`, `put`). Out: `Draft.build_root`, or
complaints, one line each with its source. Wrong values are left out and the rest is validated again, so that all
mistakes are found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stretto.base.errors import json_fault
from stretto.config.lookup import spellings, unread
from stretto.config.reading.lines import read_file
from stretto.config.reading.numbers import number_meant
from stretto.config.reading.words import Assignment, FileArgument
from stretto.config.root import RLConfig
from stretto.config.rules import all as rules
from stretto.config.rules.rule import Problem
from stretto.config.section import (
    Key,
    KeyPath,
    Section,
    all_paths,
    dotted,
    find,
    keys,
    leaves,
    meant,
    nest,
    place_meant,
    show,
    suggest,
    tag_of,
)

RUN_TABLES = ("trainer", "orchestrator", "inference")
"""A file with one of these tables is that of a whole run, not of one process."""
OUTPUT_DIR = "{output_dir}/"
MODEL_NAME = ("model", "name")
SECOND: dict[KeyPath, tuple[str, KeyPath]] = {
    MODEL_NAME: ("orchestrator", ("inference", "model")),
    ("seq_len",): ("trainer", ("orchestrator", "row_tokens")),
}
"""Keys that trainer and orchestrator may give with different values: the process whose value goes to another key."""
ROOT_WORDS = ("rl", "sft", "grpo", "train", "training", "config", "stretto", "run_config", "args")
"""Tables in which a user may have put all keys of a run."""
UNKNOWN, MISSING = "extra_forbidden", ("missing", "union_tag_not_found")
NO_VALUE = ("none", "null", "off", "no", "never", "inf", "infinity", "unlimited", "")
"""Texts that mean that a number is not set."""
TABLE_NEEDED = ("model_type", "model_attributes_type", "dict_type")
"""Errors of pydantic where a table is expected and another value is given."""


def dotted_to_path(text: str) -> KeyPath:
    """The inverse of dotted; numbers are list indices."""
    return tuple(int(part) if part.isdigit() else part for part in text.split(".")) if text else ()


def _is_below(path: KeyPath, table: KeyPath) -> bool:
    return path[: len(table)] == table


@dataclass(frozen=True)
class Given:
    """A value of a file or a flag."""

    path: KeyPath
    value: Any
    spelled: str
    """The path as written there, or the flag."""
    source: str
    """File and line, or the flag with its value."""


@dataclass
class Draft:
    """The values of a future root, the source of each, and the mistakes found so far."""

    cls: type[Section]
    values: dict[KeyPath, Any] = field(default_factory=dict)
    """By path in our spelling, as section.leaves yields them."""
    sources: dict[KeyPath, str] = field(default_factory=dict)
    written: dict[KeyPath, tuple[str, str]] = field(default_factory=dict)
    """Per value its file ("" for a flag) and its path as written there."""
    complaints: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """By path as written: what a key of another framework does not do here, or does in another way."""
    suspects: set[KeyPath] = field(default_factory=set)
    """Paths left out because they are wrong; problems that result from leaving them out are not reported."""
    is_incomplete: bool = False
    """Whether a file could not be read: what is missing may be in it."""
    is_resolved: bool = False
    """Whether the rules have been checked, and addresses and ports are filled in."""
    process: str | None = None
    """The process of a whole run that is started: rules broken only in tables of other processes are not reported."""

    def complain(self, message: str, *paths: KeyPath, source: str | None = None) -> None:
        """Add a problem once, with the sources of its paths."""
        line = self.placed(message, *paths, source=source)
        if line not in self.complaints:
            self.complaints.append(line)
        self.suspects.update(paths)

    def placed(self, message: str, *paths: KeyPath, source: str | None = None) -> str:
        """A message, preceded by the places where its paths were given."""
        found = [self.sources.get(path) for path in paths] if source is None else [source]
        if paths and not any(found):
            found = [self.source_near(paths[0])]
        places = ", ".join(dict.fromkeys(place for place in found if place))
        return f"{places}: {message}" if places else message

    def source_near(self, path: KeyPath) -> str | None:
        """The source of a key in the table at a path, or else of the nearest table above it."""
        if inside := [source for other, source in self.sources.items() if _is_below(other, path)]:
            return inside[0]
        above = (path[:depth] for depth in range(len(path), -1, -1))
        return next((self.sources[each] for each in above if each in self.sources), None)

    def add_file(self, file: FileArgument) -> None:
        """Merge one file under its section."""
        loaded = read_file(file.path)
        if isinstance(loaded, str):
            self.complain(loaded, source="")
            self.is_incomplete = True
            return
        data, lines = loaded
        places = {(*file.prefix, *path): f"{file.path}:{line}" for path, line in lines.items()}
        found = leaves(data, file.prefix)
        self.put([Given(path, value, dotted(path), places.get(path, "")) for path, value in found], file.path)
        tables = {file.prefix: file.path} | {self.own_path(path): place for path, place in places.items()}
        self.sources |= {path: place for path, place in tables.items() if path and path not in self.values}

    def own_path(self, path: KeyPath) -> KeyPath:
        """A path in our spelling."""
        found = find(self.cls, path)
        return (*found.path, *found.rest)

    def put(self, given: list[Given], file: str = "") -> None:
        """Add values: tables are merged, other values replaced; another `type` clears its table.

        file: the file with the values; "" for flags.
        """
        paths = [each.path for each in given]
        for spelling in spellings().values():
            paths = spelling.merged(paths)
        found = [(each, meant(self.cls, path, each.value)) for each, path in zip(given, paths)]
        values = [(each, path, value) for each, meaning in found for path, value in meaning.values.items()]
        named = {path for _, path, _ in values} | set(self.values)
        # Lists, then further values, then `type`s: each of them clears the values below it.
        self._put_values([item for item in values if item[2] == []], file)
        for each, meaning in found:
            for path, value in meaning.further.items():
                if path not in named:
                    self._set(path, value, each.source)
        rest = [item for item in values if item[2] != []]
        self._put_values(sorted(rest, key=lambda item: item[1][-1] != "type"), file)
        for each, meaning in found:
            if meaning.instead:
                message = f"{each.spelled} = {show(each.value)}: {meaning.instead}"
                self.complain(message, each.path, source=each.source)
            if note := meaning.beware or (meaning.idle and f"decides nothing here: {meaning.idle}"):
                self.notes[each.spelled] = f"{each.source}: {each.spelled}{':' * bool(meaning.beware)} {note}"

    def _put_values(self, values: list[tuple[Given, KeyPath, Any]], file: str) -> None:
        for each, path, value in values:
            if path in SECOND and value != self.values.get(path, value):
                path = self._place_of(path, each.spelled)
            if not self._disagrees(each, path, value, file):
                self._set(path, value, each.source)
                self.written[path] = (file, each.spelled)

    def _place_of(self, path: KeyPath, spelled: str) -> KeyPath:
        """Where a second value of a key of SECOND goes.

        A second name of the model from the orchestrator is the name of the engines' model; a second length from the
        trainer is the length of its rows.
        """
        held_in, held = self.written.get(path, ("", ""))
        process, other = SECOND[path]
        processes = [name.lstrip("-").split(".")[0] for name in (held, spelled)]
        has_engines = self.values.get(("inference",), {}) not in (None, "None")
        is_possible = self.cls is RLConfig and (has_engines or path != MODEL_NAME)
        if not is_possible or sorted(processes) != ["orchestrator", "trainer"]:
            return path
        if processes[1] == process:
            return other
        value, source = self.values.pop(path), self.sources[path]
        del self.written[path]
        self._put_values([(Given(path, value, held, source), other, value)], held_in)
        return path

    def _set(self, path: KeyPath, value: Any, source: str) -> None:
        """Set one value at a path in our spelling."""
        table = find(self.cls, path[:-1]).key if path[-1] == "type" else None
        if table and len(table.sections) > 1 and value != self.values.get(path, table.default_tag):
            self._clear(path[:-1])
        # An empty table changes nothing where there are values of it.
        if value != {} or not any(len(held) > len(path) and _is_below(held, path) for held in self.values):
            self._clear(path)
            for depth, part in enumerate(path):
                if self.values.get(path[:depth], {}) not in ({}, [] if isinstance(part, int) else {}):
                    self._clear(path[:depth])
            self.values[path] = value
        self.sources[path] = source

    def assign(self, flag: Assignment) -> None:
        """Set the value of one flag."""
        own = self.own_path(flag.path)
        for depth, index in enumerate(own):
            if not isinstance(index, int):
                continue
            table = own[:depth]
            items = {path[depth] for path in self.values if len(path) > depth and _is_below(path, table)}
            if index > len(items):
                known = f"has {len(items)} item{'s' * (len(items) > 1)}" if items else "is empty"
                message = f"{dotted(table)} {known}; the next index is {len(items)}"
                self.complain(message, flag.path, source=flag.flag)
                return
            if self.values.get(table) != []:
                self._clear(table)
                self.values[table] = []
        name = flag.flag.partition("=")[0].split()[0].replace("_", "-")
        spelled = lambda path: ".".join(map(str, (name, *path[len(flag.path) :])))
        found = leaves(flag.value, flag.path)
        self.put([Given(path, value, spelled(path), flag.flag) for path, value in found])

    def _disagrees(self, given: Given, path: KeyPath, new: Any, file: str) -> bool:
        """Report two values of one key in two spellings: in flags, a file, or files of two processes.

        A later file or flag may change a value, but the files of two processes have no order.
        """
        held_in, spelled = self.written.get(path, (file, given.spelled))
        value = self.values.get(path, new)
        is_other_process = self.cls is RLConfig and spelled.split(".")[0] != given.spelled.split(".")[0]
        if spelled == given.spelled or value == new:
            return False
        if held_in != file and not (held_in and file and is_other_process):
            return False
        message = f"{spelled} = {show(value)} but {given.spelled} = {show(new)}; give it once, as {dotted(path)}"
        self.complain(message, path, source=f"{self.sources[path]}, {given.source}")
        return True

    def _clear(self, table: KeyPath) -> None:
        """Remove the value at a path, and everything below it."""
        held: dict[KeyPath, Any]
        depth = len(table)
        for held in (self.values, self.sources, self.written):
            # Called for every value of a file: as `_is_below`, in place.
            for path in [path for path in held if path[:depth] == table]:
                del held[path]

    def _fill_in_output_dir(self) -> None:
        """Replace `{output_dir}/` at the beginning of texts by the directory of all runs."""
        given = self.values.get(("output_dir",), "outputs")
        for path, value in self.values.items() if isinstance(given, str) else ():
            if isinstance(value, str) and value.startswith(OUTPUT_DIR):
                self.values[path] = str(Path(given, value.removeprefix(OUTPUT_DIR)))

    def _correct(self) -> None:
        """Put in what values of another framework's file mean together."""
        spelled = {path: f".{name}" for path, (_, name) in self.written.items()}
        for spelling in spellings().values():
            for found in spelling.corrections(self.cls.__name__, self.values, spelled):
                if found.why:
                    name = dotted(found.path)
                    self.notes[name] = f"{self.sources[found.path]}: {name} = {self.values[found.path]} {found.why}"
                self.values[found.path] = found.value

    def build_root(self) -> Section | None:
        """The root with the values; None if there are complaints."""
        self._fill_in_output_dir()
        self._correct()
        for path, value in list(self.values.items()):
            found = find(self.cls, path)
            if isinstance(value, bool) and found.is_known and not found.key.accepts_bool:
                self.complain(f"{dotted(path)} = {show(value)}: {found.key.type_text()} is needed", path)
                del self.values[path]
            elif found.is_known:
                self._check_place(path, found.key, value)
        root = None
        while root is None:
            try:
                root = self.cls.model_validate(nest(self.values))
            except ValidationError as error:
                if not any([self._leave_out(path) for path in self._report_errors(error)]):
                    break
        if root is not None and not self.is_incomplete and not self.is_resolved:
            for problem in rules.check(root):
                self._report_rule(problem)
        return None if self.complaints else root

    def _check_place(self, path: KeyPath, key: Key, value: Any) -> None:
        """Report a variable of the shell in a path; the value without it stands in, so that nothing is missing."""
        try:
            place_meant(key, value)
        except ValueError as cause:
            self.complain(f"{dotted(path)} = {cause}", path)
            items = [str(each).replace("$", "") for each in (value if isinstance(value, list) else [value])]
            self.values[path] = items if isinstance(value, list) else items[0]

    def _leave_out(self, path: KeyPath) -> bool:
        """Remove a value, or the whole list that contains it; returns whether there was one."""
        while path and isinstance(path[-1], int):
            path = path[:-1]
        wrong = [held for held in self.values if path and _is_below(held, path)]
        for held in wrong:
            del self.values[held]
        if wrong and path[1:] and not any(_is_below(held, path[:-1]) for held in self.values):
            self.values[path[:-1]] = {}
        return bool(wrong)

    def _report_rule(self, problem: Problem) -> None:
        """Report a broken rule, unless it only results from another mistake."""
        paths = [dotted_to_path(path) for path in problem.paths]
        others = [path for path in paths if path and path[0] in RUN_TABLES and path[0] != self.process]
        if self.process is not None and paths and (others == paths or problem.is_of_run):
            return
        if not any(_is_below(a, b) or _is_below(b, a) for a in paths for b in self.suspects):
            self.complain(problem.sentence, *paths)

    def _report_errors(self, error: ValidationError) -> list[KeyPath]:
        """Report pydantic's errors; returns the paths to leave out before validating again."""
        found: dict[KeyPath, list[tuple[Any, Key | None, type[Section]]]] = {}
        for item in sorted(error.errors(include_url=False), key=lambda item: item["type"] != UNKNOWN):
            path, key, cls = self._locate(item["loc"])
            path = (*path, item["loc"][-1]) if item["type"] == UNKNOWN else path
            found.setdefault(path, []).append((item, key, cls))
        # Errors in values that nobody wrote result from a wrong value elsewhere, which is reported.
        is_given = lambda path: any(_is_below(held, path) or _is_below(path, held) for held in self.values)
        own = {path: items for path, items in found.items() if items[0][0]["type"] in MISSING or is_given(path)}
        if self.complaints or own:
            found = own
        messages = {path: [_plain(str(item["msg"])) for item, _, _ in items] for path, items in found.items()}
        return [self._report_value(path, *items[0], messages[path]) for path, items in found.items()]

    def _locate(self, location: tuple[str | int, ...]) -> tuple[KeyPath, Key | None, type[Section]]:
        """Path, key and section of a location of pydantic, which also has union tags and type names."""
        path: KeyPath = ()
        key: Key | None = None
        cls = self.cls
        level: tuple[type[Section], ...] = (cls,)
        for part in location:
            if len(level) > 1:
                level = tuple(section for section in level if tag_of(section) == part)
            elif level and part in keys(level[0]):
                key, cls = keys(level[0])[str(part)], level[0]
                path, level = (*path, part), key.sections
            elif isinstance(part, int) or (key is not None and key.is_free_table and not level):
                path, level = (*path, part), key.inner_sections if key else ()
            else:
                break
        return path, key, level[0] if len(level) == 1 else cls

    def _report_value(
        self, path: KeyPath, item: Any, key: Key | None, cls: type[Section], messages: list[str]
    ) -> KeyPath:
        """Report what is wrong with one value; returns the path to leave out.

        messages: one per type that the value might have had, in words for users.
        """
        kind, value, name = item["type"], item["input"], dotted(path)
        place, what = path, f"{name} = {show(value)}: "
        if kind == UNKNOWN:
            what = f"{name}: {self._guess(cls, path, value)}"
        elif kind in MISSING:
            example = _as_table(path, key) if key is not None and key.sections else f"`{path[-1]}`"
            what = f"{name}: required and missing; give {example}"
        elif kind == "union_tag_invalid" and key is not None:
            tags = [tag_of(section) for section in key.sections or key.inner_sections]
            others = find(self.cls, (*path, "type")).other_values
            what = f"{name}.type = {show(value['type'])}: {choose_tag(value['type'], tags, others)}"
            place = (*path, "type")
        elif key is not None and key.sections and kind in TABLE_NEEDED:
            form = _form_meant(path, key, value)
            what += (
                form
                or f"a table is needed: {_as_table(path, key)}{_as_flag(path, key) if isinstance(value, str) else ''}"
            )
        elif kind in TABLE_NEEDED and (into := _item_of(self.cls, path)):
            what += f"a table is needed: {into}"
        elif isinstance(value, str) and (reason := _json_problem(value)) is not None:
            what += f'looks like JSON and is not: {reason}; on the command line quote it as in \'[{{"id": "x"}}]\''
        elif key is not None and key.item_sections and kind == "list_type":
            what = f"{name} is a list of tables; write [[{name}]]"
        elif key is not None and len(messages) > 1:
            what += _rules(value, messages) or f"{key.type_text()} is needed{_meant(path, key, value)}"
        else:
            choices = key.choices if key else ()
            others = find(self.cls, path).other_values
            what += choose(value, choices, others) if choices else f"{messages[0]}{_meant(path, key, value)}"
        is_elsewhere = kind in MISSING and self.is_incomplete
        if not is_elsewhere and not any(_is_below(each, path) for each in self.suspects):
            self.complain(what, place)
            self.suspects.add(path)
        return path[:-1] if kind == "missing" else path

    def _guess(self, cls: type[Section], path: KeyPath, value: Any) -> str:
        """What an unknown key may mean: a similar key, or one of another variant or section."""
        here = dotted(tuple("0" if isinstance(part, int) else part for part in path))
        for known, section, _ in all_paths(self.cls):
            if known == here and tag_of(section):
                return f'unknown key for type = "{tag_of(cls)}"; it belongs to type = "{tag_of(section)}"'
        verb = "rl" if here in RUN_TABLES else "sft" if here == "data" and self.cls is RLConfig else None
        if verb is not None:
            self.is_incomplete = True  # what else is missing belongs to another verb
            return f"unknown key; a file with a [{here}] section is one for `{verb}`"
        if here in ROOT_WORDS and isinstance(value, dict):
            return f"unknown key; the keys of a run stand at the top of its file: remove [{here}], keep what is in it"
        near = suggest(self.cls, path, cls)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            near = [each for each in near if (key := find(self.cls, each).key) and key.item_sections] or near
        self.suspects.update(near)
        if not near:
            return f"unknown key; here are {', '.join(keys(cls))}{unread()}"
        if near[0][:-1] == (*path[:-1], "args"):
            return (
                f"unknown key; an argument of the environment is `args.{near[0][-1]}`; here are {', '.join(keys(cls))}"
            )
        is_neighbour = near[0][:-1] == path[:-1]
        names = " or ".join(f"`{each[-1] if is_neighbour else dotted(each)}`" for each in near)
        return f"unknown key; did you mean {names}?{unread()}"

    def report(self, verb: str) -> str:
        """All complaints, one per line."""
        count = len(self.complaints)
        lines = "\n".join(f"  {line}" for line in self.complaints)
        return f"{count} problem{'s' if count > 1 else ''} in the configuration of `{verb}`\n{lines}"


def choose(value: Any, choices: Iterable[Any], others: Iterable[str] = ()) -> str:
    """A message with the allowed values and the nearest; others: accepted, but not listed."""
    import difflib

    known = [*map(str, choices), *others]
    found = (difflib.get_close_matches(text, known, n=1) for text in (str(value).lower(), str(value)))
    near = next(filter(None, found), None)
    hint = f"; did you mean {show(near[0])}?" if near else ""
    return f"must be {' or '.join(map(show, choices))}{hint}"


def choose_tag(tag: Any, tags: list[str | None], others: Iterable[str] = ()) -> str:
    """As `choose`; for a tag of another union of `rl` it names that union."""
    import difflib

    near = difflib.get_close_matches(str(tag), [str(each) for each in tags], n=1, cutoff=0.8)
    unions = ((path, map(tag_of, key.sections)) for path, _, key in all_paths(RLConfig) if ".0." not in path)
    owner = None if near or tag is None else next((path for path, known in unions if tag in known), None)
    if owner is None:
        return choose(tag, tags, others)
    return f"must be {' or '.join(map(show, tags))}; {show(tag)} belongs to {owner}.type"


def _json_problem(text: str) -> str | None:
    """Why a text that begins like a list or table of JSON is not valid; None for other text."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return json_fault(error)
    return None


def _form_meant(path: KeyPath, key: Key, value: Any) -> str:
    """How to write a form of a table that is given by its name alone; "" for any other value."""
    if not isinstance(value, str) or value not in map(tag_of, key.sections):
        return ""
    name = dotted((*path, "type"))
    return f'a table is needed: write {name} = "{value}", or --{name.replace("_", "-")} {value}'


def _as_flag(path: KeyPath, key: Key) -> str:
    first = next((name for name in keys(key.sections[0]) if name != "type"), None)
    return f", or --{dotted((*path, first)).replace('_', '-')} ..." if first else ""


def _item_of(cls: type[Section], path: KeyPath) -> str:
    """How to write an item of a list of tables, in a file and as a flag; "" for other keys."""
    key = find(cls, path[:-1]).key
    if key is None or not key.item_sections or not isinstance(path[-1], int):
        return ""
    first = next(name for name in keys(key.item_sections[0]) if name != "type")
    flag = dotted((*path, first)).replace("_", "-")
    return f"[[{dotted(path[:-1])}]] {first} = ..., or --{flag} ..."


def _as_table(path: KeyPath, key: Key) -> str:
    """How to write a table, for a message."""
    tag = f'type = "{tag_of(key.sections[0])}", ' if len(key.sections) > 1 else ""
    first = next((name for name in keys(key.sections[0]) if name != "type"), "...")
    return f"[{dotted(path)}] {tag}{first} = ..."


def _rules(value: Any, messages: list[str]) -> str:
    """What a number must be whose key has several types with bounds; "" for another value.

    messages: one per type. An integer that breaks the bound of the first type is told that one only.
    """
    if not isinstance(value, int | float) or not any(re.search("greater|less", each) for each in messages):
        return ""
    if isinstance(value, int) and re.search("greater|less", messages[0]):
        return messages[0]
    return "must be " + " or ".join(dict.fromkeys(each.removeprefix("must be ") for each in messages))


def _meant(path: KeyPath, key: Key | None, value: Any) -> str:
    """What a text in place of a number means, for the end of a message; "" for other values and keys."""
    words = key.type_text() if key is not None else ""
    is_number = words.startswith(("number", "integer"))
    if key is None or not is_number or not isinstance(value, str):
        return ""
    if value.strip().lower() in NO_VALUE and key.is_nullable:
        return "; for none leave it out, or write None on the command line"
    return number_meant(str(path[-1]), value, is_whole=words.startswith("integer") and "or number" not in words)


def _plain(message: str) -> str:
    """Pydantic's message in words for users of TOML."""
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    message = re.sub(r"^a valid dictionary.*", "a table is needed", message)
    message = re.sub(r"^(a valid string|Input is not a valid path.*)", "must be a text in quotes", message)
    message = re.sub(r", unable to parse string as an? \w+$", "", message)
    message = re.sub(r", got a number with a fractional part$", "", message)
    message = re.sub(
        r"^Unable to parse input string as an integer, exceeded.*",
        "is larger than any whole number here; give a smaller one",
        message,
    )
    message = re.sub(r"^a valid boolean, unable to interpret input$", "true or false", message)
    return re.sub(r"^(greater|less|a valid|a multiple|finite|a finite|true or false)", r"must be \1", message)
