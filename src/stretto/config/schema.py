"""What the config classes say about themselves: keys, types, variants, ranges, aliases, docstrings.

The loader, `--help` and docs/config.md read classes only through here. A union of sections is told apart by
`type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from stretto.config.section import Section, all_aliases, members, rename_aliases

Path = tuple[str | int, ...]
"""Where a value stands in a config: keys, and indices of lists."""


@dataclass(frozen=True, eq=False)
class Key:
    """One key of a section."""

    name: str
    field: FieldInfo
    members: tuple[Any, ...]
    """Members of its type, None left out."""
    is_nullable: bool

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The sections it can hold: one, or the variants of a union; empty for a value."""
        return tuple(member for member in self.members if _is_section(member))

    @property
    def item_sections(self) -> tuple[type[Section], ...]:
        """The sections of a list of tables; empty for everything else."""
        items = (item for member in self.members if get_origin(member) is list for item in get_args(member))
        return tuple(section for item in items for section in members(item) if _is_section(section))

    @property
    def is_bool(self) -> bool:
        """Whether a bare flag sets it."""
        return self.members == (bool,)

    @property
    def accepts_bool(self) -> bool:
        """Whether true and false are values of it."""
        return bool in self.members or Any in self.members

    @property
    def is_list(self) -> bool:
        """Whether it can hold a list."""
        return any(get_origin(member) is list for member in self.members)

    @property
    def is_free_table(self) -> bool:
        """Whether it is a table with keys of the user's own."""
        return any(get_origin(member) is dict for member in self.members)

    @property
    def accepts_text(self) -> bool:
        """Whether text on the command line is taken as it stands."""
        return any(member in (str, FilePath) for member in self.members) or bool(self.choices)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal."""
        return tuple(v for member in self.members if get_origin(member) is Literal for v in get_args(member))

    @property
    def default_tag(self) -> str | None:
        """The `type` that a union of sections has when none is given."""
        return getattr(self.field.default, "type", None)

    @property
    def doc(self) -> str:
        """Its docstring; a section's own where the key has none."""
        text = self.field.description or (self.sections[0].__doc__ if len(self.sections) == 1 else "") or ""
        if not text and self.sections:
            text = f"By `type`: {', '.join(str(tag_of(section)) for section in self.sections)}."
        if not text and self.name == "type":
            text = "Which form of the section."
        return " ".join(text.split())

    def variants(self, data: dict[str, Any]) -> tuple[type[Section], ...]:
        """The sections that raw data can mean; empty where its `type` is none of them."""
        if len(self.sections) < 2:
            return self.sections
        tag = data.get("type", self.default_tag)
        return tuple(s for s in self.sections if tag is None or tag_of(s) == tag)

    def type_text(self) -> str:
        """Its type in words a user knows, with the range."""
        shown = [_type_words(member) for member in self.members]
        text = " or ".join(dict.fromkeys(shown)) + _range(self.field)
        return text + (" or None" if self.is_nullable else "")

    def default_text(self) -> str:
        """Its default as TOML would write it; `required` without one."""
        if self.field.is_required():
            return "required"
        default = self.field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            return f'type = "{default.type}"' if hasattr(default, "type") else "{}"
        return toml_text(default)


def keys(cls: type[Section]) -> dict[str, Key]:
    """The keys of a section, in order."""
    return _keys(cls)


@cache
def _keys(cls: type[Section]) -> dict[str, Key]:
    result = {}
    for name, field in cls.model_fields.items():
        types = members(field.annotation)
        result[name] = Key(name, field, tuple(t for t in types if t is not NoneType), NoneType in types)
    return result


def tag_of(section: type[Section]) -> str | None:
    """The `type` of a union's variant."""
    key = keys(section).get("type")
    return key.choices[0] if key else None


def all_paths(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], Key]]:
    """Every dotted path below a section with the section it stands in; list items have `0` in theirs."""
    for name, key in keys(cls).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, cls, key
        for section in key.sections:
            yield from all_paths(section, path)
        for section in key.item_sections:
            yield from all_paths(section, f"{path}.0")


def canonical(
    cls: type[Section], data: dict[str, Any], renamed: list[tuple[Path, Path]]
) -> list[tuple[Path, str]]:
    """Rename, in place, the aliases in every section; renames go to `renamed`, conflicts come back."""
    conflicts: list[tuple[Path, str]] = []

    def visit(section: type[Section], table: dict[str, Any], at: Path) -> None:
        try:
            canonical_table, moves = rename_aliases(section, table)
        except ValueError as error:
            conflicts.append((at, str(error)))
            return
        renamed.extend(((*at, *old.split(".")), (*at, *new.split("."))) for old, new in moves.items())
        table.clear()
        table.update(canonical_table)
        for name, key in keys(section).items():
            value = table.get(name)
            if isinstance(value, dict):
                for variant in key.variants(value):
                    visit(variant, value, (*at, name))
            elif isinstance(value, list) and key.item_sections:
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        visit(key.item_sections[0], item, (*at, name, index))

    visit(cls, data, ())
    return conflicts


def toml_text(value: Any) -> str:
    """A value as TOML would write it; None as None."""
    if value is None:
        return "None"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 100_000:
        return f"{value:_}"
    if isinstance(value, float) and value == int(value) and abs(value) < 1e6:
        return f"{value:.1f}"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return f'"{value}"'


def _is_section(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Section)


def _type_words(member: Any) -> str:
    origin = get_origin(member)
    if origin is Literal:
        return " or ".join(toml_text(value) for value in get_args(member))
    if origin is list:
        inner = " or ".join(_type_words(item) for item in members(get_args(member)[0]))
        return f"list of {'tables' if inner == 'table' else inner}"
    if origin is dict or _is_section(member):
        return "table"
    return {str: "text", FilePath: "path", bool: "true or false", int: "integer", float: "number"}.get(
        member, "any"
    )


def _range(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = {
        name: value
        for item in field.metadata
        for name in signs
        if (value := getattr(item, name, None)) is not None
    }
    parts = [f"{signs[name]} {value:g}" for name, value in found.items()]
    parts += [f"a multiple of {m:g}" for item in field.metadata if (m := getattr(item, "multiple_of", None))]
    return " " + ", ".join(parts) if parts else ""


def spellings(cls: type[Section]) -> list[str]:
    """Keys of a section and its one-word aliases: what an unknown key may have meant."""
    return [*keys(cls), *(alias for alias in all_aliases(cls) if "." not in alias)]


def has_key(cls: type[Section], option: str) -> bool:
    """Is `--tensor-parallel-size` or `--no-inference` a key or an alias at the root of this class?"""
    name = option.removeprefix("--").replace("-", "_")
    return any(spelling in spellings(cls) for spelling in (name, name.removeprefix("no_")))
