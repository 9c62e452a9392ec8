"""The strict base of every config section. Torch-free: a dry run on a laptop needs only pydantic.

A section accepts what a TOML file can say: `"None"` for None where None is allowed, a union without its
`type` (the default's variant), and the other spellings listed in its `aliases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Unknown keys are errors; values cannot change after loading; a field's docstring is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    aliases: ClassVar[dict[str, str]] = {}
    """Other spelling -> key; both are dotted paths relative to this section."""

    @model_validator(mode="before")
    @classmethod
    def _accept_spellings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data, _ = rename_aliases(cls, data)
        nullable, tags = _spellings(cls)
        for key, value in data.items():
            if value == "None" and key in nullable:
                data[key] = None
            elif isinstance(value, dict) and key in tags and "type" not in value:
                data[key] = {"type": tags[key], **value}
        return data


def all_aliases(cls: type[Section]) -> dict[str, str]:
    """The aliases of a section and of the sections it extends."""
    merged: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        merged |= vars(parent).get("aliases", {})
    return merged


def rename_aliases(cls: type[Section], data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of one section's raw data with the aliases renamed, and the renames made (old -> new path).

    Raises: ValueError where an alias and its key are both given and differ.
    """
    data = dict(data)
    renamed: dict[str, str] = {}
    for old, new in all_aliases(cls).items():
        found, value = _pop(data, old.split("."))
        if not found:
            continue
        _put(data, new.split("."), value, f"`{old}` is another spelling of `{new}`")
        renamed[old] = new
    return data, renamed


def _pop(data: dict[str, Any], path: list[str]) -> tuple[bool, Any]:
    """Take the value at a path out of nested dicts, which are copied on the way; emptied dicts go too."""
    head, *rest = path
    if head not in data:
        return False, None
    if not rest:
        return True, data.pop(head)
    if not isinstance(data[head], dict):
        return False, None
    inner = dict(data[head])
    found, value = _pop(inner, rest)
    if found:
        data[head] = inner
        if not inner:
            del data[head]
    return found, value


def _put(data: dict[str, Any], path: list[str], value: Any, why: str) -> None:
    head, *rest = path
    if rest:
        inner = dict(data[head]) if isinstance(data.get(head), dict) else {}
        data[head] = inner
        _put(inner, rest, value, why)
    elif isinstance(data.get(head), dict) and isinstance(value, dict):
        inner = dict(data[head])
        data[head] = inner
        for key, item in value.items():
            _put(inner, [key], item, why)
    elif isinstance(data.get(head), dict):
        raise ValueError(f"{why}; unknown keys beside it: {', '.join(data[head])}")
    elif head in data and data[head] != value:
        raise ValueError(f"{why}; both are given, {value!r} and {data[head]!r}: give it once")
    else:
        data[head] = value


@cache
def _spellings(cls: type[Section]) -> tuple[frozenset[str], dict[str, str]]:
    """Keys that may be None, and the default `type` of keys that are unions."""
    nullable = frozenset(k for k, field in cls.model_fields.items() if NoneType in members(field.annotation))
    tags = {k: f.default.type for k, f in cls.model_fields.items() if hasattr(f.default, "type")}
    return nullable, tags


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union type, Annotated wrappers removed; one member for a plain type."""
    return tuple(_members(annotation))


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation
