"""Checks of single values that users' code and files give: numbers, texts, and what JSON can hold.

Each check takes the place for its message, and the kind of error that it raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stretto.base.errors import DataError, EnvError, StrettoError

_MAX_VALUE_CHARS = 80
"""Characters of a wrong value that a message shows."""
_MAX_DEPTH = 200
"""Levels of lists and objects; encoders and templates fail at some hundreds."""


def checked_number(value: Any, where: str, what: str) -> float:
    """A finite number as a float: of Python, of numpy, or a tensor without dimensions; `where` may be empty.

    Raises: EnvError with the value otherwise.
    """
    place = f"{where}: " if where else ""
    problem = f"{place}{what} is {describe_value(value)}, not a finite number"
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", None) or not hasattr(value, "__float__"):
        raise EnvError(f"{problem}; {_way_to_number(value)}")
    try:
        number = float(value)
    except Exception as cause:  # whatever a foreign __float__ raises
        raise EnvError(f"{problem}; return a float") from cause
    if not math.isfinite(number):
        raise EnvError(f"{problem}; look for a division by zero or an overflow")
    return number


def _way_to_number(value: Any) -> str:
    """What to return instead of a value that is no number."""
    if value is None:
        return "return a float on every path, also where the function ends without `return`"
    if isinstance(value, str):
        return "return a float, such as float(...) of the text"
    if getattr(value, "ndim", None) or isinstance(value, list | tuple | Mapping | set):
        return "return one float, such as their mean"
    return "return a float"


def describe_value(value: Any) -> str:
    """A value for a message: its type, and the first characters of its repr."""
    try:
        text = repr(value)
    except Exception:  # the repr of a user's class may raise anything
        return f"a {type(value).__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        return text[:_MAX_VALUE_CHARS]
    text = text.replace("\n", " ")
    cut = text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."
    return f"{type(value).__name__} {cut}"


def is_unicode(text: str) -> bool:
    """Has the text no lone surrogate, which no encoder of UTF-8 takes?"""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_whole_text(text: str) -> str:
    """The text with U+FFFD in the place of each lone surrogate."""
    if is_unicode(text):
        return text
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


def refuse_surrogates(value: Any, where: str, depth: int = 0) -> None:
    """Check all texts of a record, keys too.

    Raises: DataError that names the entry with a lone surrogate, such as half of an emoji.
    """
    if depth > _MAX_DEPTH:
        raise DataError(f"{where[:200]}: more than {_MAX_DEPTH} levels of lists and objects; flatten it")
    if isinstance(value, str) and not is_unicode(value):
        at = next(i for i, char in enumerate(value) if "\ud800" <= char <= "\udfff")
        raise DataError(
            f"{where}: character {at + 1} of {describe_value(value)} is half of a surrogate pair (a text that was cut "
            "within a character), and no tokenizer takes it; write the whole character, or remove it"
        )
    if isinstance(value, Mapping):
        for key, entry in value.items():
            refuse_surrogates(key, where, depth)
            refuse_surrogates(entry, f"{where}: {key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            refuse_surrogates(entry, f"{where}[{index}]", depth + 1)


def checked_json(value: Any, where: str, kind: type[StrettoError] = EnvError, depth: int = 0) -> Any:
    """The value as JSON holds it: lone surrogates become U+FFFD, scalars of numpy become Python's.

    Raises: `kind` that names the entry that JSON cannot hold, such as a set or a date.
    """
    if isinstance(value, str):
        return with_whole_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise kind(f"{where} is {value}, which JSON cannot hold; give None, or a number that is finite")
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > _MAX_DEPTH:
        raise kind(f"{where[:200]}: more than {_MAX_DEPTH} levels of lists and objects; flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise kind(f"{where} has the key {describe_value(key)}; keys of JSON are text, so give str(...)")
        entries = value.items()
        return {
            with_whole_text(key): checked_json(entry, f"{where}[{key!r}]", kind, depth + 1) for key, entry in entries
        }
    if isinstance(value, list | tuple):
        return [checked_json(entry, f"{where}[{index}]", kind, depth + 1) for index, entry in enumerate(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return checked_json(value.item(), where, kind, depth)
    way = "give a sorted list" if isinstance(value, set | frozenset) else "give text, numbers, lists or objects"
    raise kind(f"{where} is {describe_value(value)}, which JSON cannot hold; {way}")


def _without_filling(value: Any) -> Any:
    """The value without the null entries of objects, which Arrow adds to objects with different keys.

    Nulls in lists, such as a member of `enum`, stay.
    """
    if isinstance(value, Mapping):
        return {key: _without_filling(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_without_filling(entry) for entry in value]
    return value


def _describes(entry: Any) -> bool:
    """Is it a message, or a tool?"""
    return isinstance(entry, dict) and (
        isinstance(entry.get("role"), str) or bool({"function", "parameters"} & entry.keys())
    )


def without_null_columns(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a column format, whose objects all have each other's keys, without the nulls that this adds.

    Only messages, with their calls, and tools are changed; tools that are JSON in a text stay as they are.
    """
    return {
        key: _without_filling(value) if isinstance(value, list) and any(map(_describes, value)) else value
        for key, value in record.items()
    }
