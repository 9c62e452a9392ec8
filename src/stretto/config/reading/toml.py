"""A root as TOML that `@` reads again: what `--print-config` prints.

TOML has no null: None is written as `"None"` where a key accepts it. Secret keys, and null in tables in which users
choose the keys, become comments. So do keys that a start chooses by itself and that are not given: as values they would
be the user's choice, and a port in use would be an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from stretto.config.masks import is_secret
from stretto.config.section import KeyPath, Section, find

CHOSEN_AT_START = frozenset({"port", "host", "base_url", "gpu_memory_utilization", "finish_within_s"})
"""Keys that a start chooses by itself if they are not given, such as a free port."""
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(cls: type[Section], data: dict[str, Any], unwritten: Collection[KeyPath] = ()) -> str:
    """JSON data of a root of this class as TOML; keys in `unwritten` become comments."""
    return "\n".join(_table(cls, (), data, unwritten)) + "\n"


def chosen_at_start(root: Section, at: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of keys that are not given and that a start may choose by itself."""
    for name, value in root:
        if name in CHOSEN_AT_START and name not in root.model_fields_set:
            yield (*at, name)
        items = enumerate(value) if isinstance(value, list) else ()
        below = [((*at, name), value), *(((*at, name, index), item) for index, item in items)]
        for path, section in below:
            if isinstance(section, Section):
                yield from chosen_at_start(section, path)


def _table(cls: type[Section], path: KeyPath, data: dict[str, Any], unwritten: Collection[KeyPath]) -> Iterator[str]:
    """Lines of a table: first its values, then its tables."""
    for name, value in data.items():
        if (*path, name) in unwritten:
            yield f"# {_key(name)} = {_value(value)}  # unless a start chooses another"
        elif not isinstance(value, dict) and not _is_list_of_tables(value):
            yield _line(cls, (*path, name), name, value)
    for name, value in data.items():
        header = ".".join(_key(part) for part in (*path, name) if isinstance(part, str))
        if isinstance(value, dict):
            yield from ("", f"[{header}]", *_table(cls, (*path, name), value, unwritten))
        elif _is_list_of_tables(value):
            for index, item in enumerate(value):
                yield from ("", f"[[{header}]]", *_table(cls, (*path, name, index), item, unwritten))


def _line(cls: type[Section], path: KeyPath, name: str, value: Any) -> str:
    if value is not None and is_secret(name):
        return f"# {_key(name)} is given and not shown"
    if _has_null(value) and not (value is None and find(cls, path).is_known):
        return f"# {_key(name)} holds null, which TOML cannot say: {json.dumps(value)}"
    return f"{_key(name)} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{_key(name)} = {_value(item)}" for name, item in value.items() if not is_secret(name))
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) or value is None:
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else _value(name)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_null, value.values() if isinstance(value, dict) else value))
    return value is None
