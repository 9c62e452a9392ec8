"""The strict base class of config sections, and their keys, types and docs as data.

Imports no torch: a dry run on a laptop needs only pydantic. A section accepts what TOML can express: `"None"` for None
where None is allowed, a union without its `type` (the default's variant), and the spellings of spellings/.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from stretto.config.lookup import aliases_of, match, renamed
from stretto.config.spelling import GivenName, Instead, Nothing, Row
from stretto.config.spelling import KeyPath as KeyPath
from stretto.config.synonyms import keys_meant


class Section(BaseModel):
    """Unknown keys are errors; values cannot change after loading; a field's docstring is its help text, also where
    a class that extends this one gives the field another default."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_spellings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values: dict[KeyPath, Any] = {}
        further: dict[KeyPath, Any] = {}
        for path, value in leaves(data):
            meaning = meant(cls, path, value)
            if meaning.instead:
                raise ValueError(f"`{dotted(path)}` = {show(value)}: {meaning.instead}")
            further |= meaning.further
            for own, value in meaning.values.items():
                found = find(cls, own)
                value = None if value == "None" and found.is_known and found.key.is_nullable else value
                if found.is_known:
                    try:
                        value = place_meant(found.key, value)
                    except ValueError as cause:
                        raise ValueError(f"`{dotted(own)}` = {cause}") from None
                if values.setdefault(own, value) != value:
                    raise ValueError(f"`{dotted(own)}` has two values, {show(values[own])} and {show(value)}")
        values = {path: value for path, value in further.items() if path not in values} | values
        by_name = {dotted(path): value for path, value in values.items()}
        for name, value in cls._derived(by_name).items():
            path = tuple(int(part) if part.isdigit() else part for part in name.split("."))
            above = [path[:depth] for depth in range(1, len(path)) if path[:depth] in values]
            if path not in values and all(_has_room(values[each], path[len(each)]) for each in above):
                for each in above:
                    if values[each] is None:
                        del values[each]
                values[path] = value
        data = nest(values)
        for name, key in keys(cls).items():
            if isinstance(table := data.get(name), dict) and key.default_tag and "type" not in table:
                data[name] = {"type": key.default_tag, **table}
        return data

    @classmethod
    def _derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that follow from the given ones, by dotted path; a given value is never replaced."""
        return {}


def _has_room(value: Any, part: str | int) -> bool:
    """Whether an empty value can get a key, or an item, that was not given."""
    return value is None or value == ([] if isinstance(part, int) else {})


NAMES_OF_PLACES = ("name", "model", "template", "chat_template")
"""Keys of texts that may be a path: of a model, a data set, a template."""


def place_meant(key: Key, value: Any) -> Any:
    """The value of a key with `~` as the home directory, if it can be a path.

    Raises: ValueError for a variable of the shell in it, or the home of a user whom this machine does not know.
    """
    if isinstance(value, list) and key.is_list and key.name in NAMES_OF_PLACES:
        return [place_meant(key, each) for each in value]
    is_path = Path in key.members
    if not isinstance(value, str | Path) or not (is_path or key.name in NAMES_OF_PLACES):
        return value
    text = str(value)
    if "\n" not in text and (found := re.search(r"\$(\w+|\{\w+\})", text)) and (is_path or "/" in text):
        raise ValueError(
            f"{show(text)}: only a shell replaces {found[0]}, and no shell reads this; write the whole "
            "path, or begin it with ~ for your home directory"
        )
    if not text.startswith("~"):
        return value
    if (whole := os.path.expanduser(text)) == text and (is_path or "/" in text):
        raise ValueError(
            f"{show(text)}: no user of this machine has the home {text.partition('/')[0]}; write the whole path"
        )
    return whole


# -- nested data and paths --


def leaves(data: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Values of nested tables by path; also empty tables, and `[]` before a list's tables."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*at, key))
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        yield at, []
        for index, item in enumerate(data):
            yield from leaves(item, (*at, index))
    elif at:
        yield at, data


def nest(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The inverse of leaves."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        node: Any = root
        for part, after in itertools.pairwise((*path, None)):
            if isinstance(node, list):
                node.extend({} for _ in range(len(node), part + 1))  # type: ignore[operator]
            if after is None:
                node[part] = value.copy() if isinstance(value, dict | list) else value
            else:
                if isinstance(node, dict):
                    node.setdefault(part, [] if isinstance(after, int) else {})
                node = node[part]
    return root


def dotted(path: KeyPath) -> str:
    """`orchestrator.env.0.id`."""
    return ".".join(map(str, path))


# -- keys --


@dataclass(frozen=True, eq=False)
class Key:
    """One key of a section."""

    owner: type[Section]
    name: str
    field: FieldInfo
    members: tuple[Any, ...]
    """Members of its type without None."""
    is_nullable: bool

    @cached_property
    def sections(self) -> tuple[type[Section], ...]:
        """The sections it can hold: one, or the variants of a union; empty for a value."""
        return tuple(member for member in self.members if _is_section(member))

    @cached_property
    def item_sections(self) -> tuple[type[Section], ...]:
        """The sections of a list of tables; empty for everything else."""
        return self.inner_sections if self.is_list else ()

    @cached_property
    def inner_sections(self) -> tuple[type[Section], ...]:
        """The sections of a list of tables, or of a table in which users choose the keys."""
        items = (args[-1] for member in self.members if (args := get_args(member)))
        return tuple(section for item in items for section in members(item) if _is_section(section))

    @property
    def accepts_bool(self) -> bool:
        """Whether it can be true or false, or is a table, for which another message is better."""
        is_table = bool(self.sections or self.item_sections)
        return is_table or any(member in (bool, Any) for member in self.members)

    @property
    def is_bool(self) -> bool:
        """Whether a flag without a value sets it."""
        return self.members == (bool,)

    @property
    def is_list(self) -> bool:
        """Whether it can hold a list."""
        return any(get_origin(member) in (list, tuple) for member in self.members)

    @property
    def is_free_table(self) -> bool:
        """Whether it is a table in which users choose the keys."""
        return any(get_origin(member) is dict for member in self.members)

    @cached_property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal."""
        return tuple(v for member in self.members if get_origin(member) is Literal for v in get_args(member))

    @cached_property
    def default_tag(self) -> str | None:
        """The `type` of a union that is given without one: the default's, else the first.

        A union that may be left out has none, unless its field names one: `json_schema_extra={"type": ...}`.
        """
        if not self.field.is_required():
            if isinstance(named := self.field.json_schema_extra, dict):
                return str(named["type"])
            return getattr(self.field.default, "type", None)
        return tag_of(self.sections[0]) if len(self.sections) > 1 else None

    @property
    def doc(self) -> str:
        """Its docstring, or that of the key it overrides, or that of its section."""
        above = [section for section in self.owner.__mro__ if issubclass(section, Section)]
        found = (_field_docs(section.__module__).get((section.__name__, self.name)) for section in above)
        own = self.sections[0].__doc__ if len(self.sections) == 1 else None
        text = next(filter(None, found), own) or ""
        if not text and self.sections:
            text = f"By `type`: {', '.join(str(tag_of(section)) for section in self.sections)}."
        return " ".join((text or ("Which form of the section." if self.name == "type" else "")).split())

    def type_text(self) -> str:
        """Its type and range in words that users know."""
        text = " or ".join(dict.fromkeys(map(_type_words, self.members))) + _range(self.field)
        return text + (" or None" if self.is_nullable else "")

    def default_text(self) -> str:
        """Its default as TOML would write it; `required` without one."""
        if self.field.is_required():
            return "required"
        default = self.field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            return f'type = "{default.type}"' if hasattr(default, "type") else "{}"
        return show(default, is_exact=True)


@cache
def keys(cls: type[Section]) -> dict[str, Key]:
    """The keys of a section, in order."""
    result = {}
    for name, info in cls.model_fields.items():
        types = tuple(members(info.annotation))
        result[name] = Key(cls, name, info, tuple(t for t in types if t is not NoneType), NoneType in types)
    return result


@cache
def _field_docs(module: str) -> dict[tuple[str, str], str]:
    """Docstrings below fields by class and field; parsed on first use, so that imports stay fast."""
    return {
        (section.name, ast.unparse(field.target)): ast.literal_eval(text.value)
        for section in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(section, ast.ClassDef)
        for field, text in itertools.pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@cache
def _names(cls: type[Section]) -> tuple[str, ...]:
    """Names of the sections that a section extends, then its own."""
    return tuple(parent.__name__ for parent in reversed(cls.__mro__) if issubclass(parent, Section))


@cache
def _names_of(level: tuple[type[Section], ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(map(_names, level))))


@cache
def all_aliases(cls: type[Section]) -> dict[str, str]:
    """Other names of a section's keys, inherited ones included."""
    return aliases_of(_names(cls))


@dataclass(frozen=True)
class Found:
    """The key that a path in any spelling leads to."""

    path: KeyPath
    """The part of the path that leads to known keys, in our spelling."""
    key: Any
    """The last key on the way: a Key, or None at an item of a list."""
    rest: KeyPath
    """The rest of the path: keys that users choose, or unknown ones."""
    row: Row | None = None
    """The row of the table of spellings for the path, or for a beginning of it."""
    row_at: KeyPath = ()
    """Path of the section that the row belongs to."""
    is_row_whole: bool = False
    """Whether the row covers the whole path."""

    @property
    def other_values(self) -> list[str]:
        """Names that other frameworks have for values of the key."""
        values = self.row.values if self.row is not None and self.is_row_whole else {}
        return [name for name, ours in values.items() if isinstance(name, str) and isinstance(ours, str)]

    @property
    def is_known(self) -> bool:
        """Whether the whole path leads to a key."""
        return self.key is not None and not self.rest


def find(cls: type[Section], path: Sequence[str | int]) -> Found:
    """Follow a path down from a section, in any spelling."""
    done: KeyPath = ()
    rest: KeyPath = tuple(path)
    key: Key | None = None
    row: tuple[Row | None, KeyPath, bool] = (None, (), False)
    level: tuple[type[Section], ...] = (cls,)
    while rest:
        if key is not None and key.item_sections and str(rest[0]).isdigit():
            done, rest, level, key = (*done, int(rest[0])), rest[1:], key.item_sections, None
            continue
        if matched := match(_names_of(level), rest):
            covered, here = matched
            if here.is_refused or here.ours == "":
                return Found(done, None, rest, here, done, covered == len(rest))
            has_setter = row[0] is not None and row[0].sets and row[2]  # an earlier row for the whole path
            if here.sets or (covered == len(rest) and not has_setter):
                row = (here, done, covered == len(rest))
            if here.ours is not None:
                ours = (*renamed(here, rest), *rest[covered:])
                if here.ours.startswith("/") and done:
                    done, level, key = (), (cls,), None
                    rest = ours
                    continue
                rest = ours
        name = str(rest[0])
        inner = next((keys(section)[name] for section in level if name in keys(section)), None)
        if inner is None:
            break
        done, rest, level, key = (*done, name), rest[1:], inner.sections, inner
    return Found(done, key, rest, *row)


@dataclass(frozen=True)
class Meaning:
    """The values that one given value sets, or why it sets none."""

    values: dict[KeyPath, Any]
    """By path in our spelling; empty for a key that decides nothing here."""
    further: dict[KeyPath, Any] = field(default_factory=dict)
    """Further values that it sets, unless they are given too."""
    instead: str = ""
    """If not empty, it is refused: what to write."""
    idle: str = ""
    """If not empty, it decides nothing here: why."""
    beware: str = ""
    """If not empty, it counts something else here than there: what."""


def meant(cls: type[Section], path: KeyPath, value: Any) -> Meaning:
    """The meaning of a value at a path in any spelling."""
    found = find(cls, path)
    own, row = (*found.path, *found.rest), found.row
    if row is None:
        return Meaning({own: value})
    if row.is_refused:
        is_accepted = ("None" if value is None else value) in row.unless
        return Meaning({}) if is_accepted else Meaning({}, instead=row.instead)
    if row.ours == "":
        return Meaning({}, idle=row.note)
    is_word = found.is_row_whole and isinstance(value, str | int | NoneType)
    new = row.values.get(value, value) if is_word else value
    if isinstance(new, Instead):
        return Meaning({}, instead=new.text)
    if new is Nothing:
        return Meaning({})
    package = value.rsplit("/", 1)[-1].split("@", 1)[0] if isinstance(value, str) else value
    sets = {name: package if each is GivenName else each for name, each in row.sets}
    further = {(*found.row_at, *name.split(".")): each for name, each in sets.items()}
    return Meaning({own: new}, further, beware=row.beware)


def tag_of(section: type[Section]) -> str | None:
    """The `type` of a union's variant."""
    key = keys(section).get("type")
    return key.choices[0] if key else None


def all_paths(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], Key]]:
    """Dotted path (`0` for list items), section and key of everything below a section."""
    for name, key in keys(cls).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, cls, key
        for section in key.sections:
            yield from all_paths(section, path)
        for section in key.item_sections:
            yield from all_paths(section, f"{path}.0")


def spellings(cls: type[Section]) -> list[str]:
    """Keys of a section and its one-word aliases."""
    return [*keys(cls), *(alias for alias in all_aliases(cls) if "." not in alias)]


_BEGUN = 3
"""Letters of a key's beginning that mean it, if it is the only one."""


def suggest(cls: type[Section], path: KeyPath, here: type[Section] | None = None) -> list[KeyPath]:
    """Keys that an unknown path may mean: a similar one, or up to two of that name elsewhere.

    here: the section that the path ends in; None: any variant of it.
    """
    import difflib

    *above, name = map(str, path)
    level = tuple("0" if part.isdigit() else part for part in above)
    known = [(tuple(each.split(".")), section) for each, section, _ in all_paths(cls)]
    for meant in (tuple(key.split(".")) for key in keys_meant(dotted((*level, name)))):
        place = find(cls, meant)
        if place.is_known or (place.key is not None and place.key.is_free_table):
            return [(*path[:-1], meant[-1])] if meant[:-1] == level else [meant]
    around = [here] if here else [section for each, section in known if each[:-1] == level]
    beside = [each for section in around for each in spellings(section)]
    begun = {each for each in beside if each.startswith(name)} if len(name) >= _BEGUN else set()
    if len(begun) == 1:
        return [(*path[:-1], *begun)]
    if near := difflib.get_close_matches(name, beside, n=1):
        return [(*path[:-1], near[0])]
    if any({"id", "args"} <= set(keys(section)) for section in around):  # an argument of the environment
        return [(*path[:-1], "args", name)]
    whole = [each for each, _ in known if each[-len(path) :] == (*level, name)]
    known = [(each, section) for each, section in known if "0" not in each]
    same = [each for each, _ in known if each[-1] == name]
    below = [each for each in same if each[: len(level)] == level]
    if found := list(dict.fromkeys(whole or below or same)):
        return list(found[:2])
    everything = [dotted(each) for each, _ in known if here is None]
    close = difflib.get_close_matches(".".join((*level, name)), everything, n=1, cutoff=0.7)
    return [tuple(each.split(".")) for each in close]


def has_key(cls: type[Section], option: str) -> bool:
    """Whether an option such as `--no-inference` is a key or an alias at the root of this class.

    An alias of an entry in a table in which users choose the keys, such as an option of vLLM's, does not count.
    """
    name = option.removeprefix("--").replace("-", "_")
    names = {name, name.removeprefix("no_")} & set(spellings(cls))
    return any(not find(cls, (each,)).rest for each in names)


# -- words --


def show(value: Any, *, is_exact: bool = False) -> str:
    """A value as TOML would write it, short, for a message; is_exact: as a default in the docs."""
    if value is None or isinstance(value, bool):
        return "None" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.1f}" if is_exact and value == int(value) and abs(value) < 1e6 else f"{value:g}"
    if isinstance(value, int):
        return f"{value:_}" if is_exact and value >= 100_000 else str(value)
    if isinstance(value, dict):
        items = ", ".join(f"{key} = {show(item, is_exact=is_exact)}" for key, item in value.items())
        return f"{{{items}}}" if is_exact else f"{{ {items} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item, is_exact=is_exact) for item in value)}]"
    return f'"{value}"' if is_exact or isinstance(value, str) else str(value)


def members(annotation: Any) -> Iterator[Any]:
    """The members of a union type, Annotated wrappers removed; one member for a plain type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def _is_section(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Section)


_TYPE_WORDS = {str: "text", Path: "path", bool: "true or false", int: "integer", float: "number"}


def _type_words(member: Any) -> str:
    origin = get_origin(member)
    if origin is Literal:
        return " or ".join(show(value, is_exact=True) for value in get_args(member))
    if origin in (list, tuple):
        inner = " or ".join(_type_words(item) for item in members(get_args(member)[0]))
        return f"list of {'tables' if inner == 'table' else inner}"
    return "table" if origin is dict or _is_section(member) else _TYPE_WORDS.get(member, "any")


_SIGNS = {"gt": "> ", "ge": ">= ", "lt": "< ", "le": "<= ", "multiple_of": "a multiple of "}


def _range(field: FieldInfo) -> str:
    found = [
        f"{sign}{'2**63' if value == 2**63 else format(value, 'g')}"
        for name, sign in _SIGNS.items()
        for item in field.metadata
        if (value := getattr(item, name, None)) is not None
    ]
    return " " + ", ".join(found) if found else ""
