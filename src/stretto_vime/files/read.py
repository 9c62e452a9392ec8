"""Reads YAML files, and checks the keys and types of their tables."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, reason_of


def read_yaml(path: str, where: str) -> dict[str, Any]:
    """The table in a YAML file.

    Raises: ConfigError that begins with `where`, the flag, if it cannot be read or holds no table.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).expanduser().read_text())
    except OSError as cause:
        raise ConfigError(f"{where}: {reason_of(cause, Path(path))}; give the path of a YAML file") from None
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(cause, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{where}{line}: not YAML: {problem}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: a table is needed, and the file holds {type(found).__name__}")
    return {str(key): value for key, value in found.items()}


def read_arguments(path: str, where: str) -> dict[str, Any]:
    """The values of --custom-config-path by attribute: of flags, and others, which functions find in `args`.

    Raises: ConfigError as `read_yaml`.
    """
    return {key.replace("-", "_"): value for key, value in read_yaml(path, where).items()}


def entries(table: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """The list of tables under a key, the only one of the file.

    Raises: ConfigError for anything else.
    """
    check_keys(table, (key,), where)
    found = table.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{where}: `{key}:` must be a list with one table each")
    return [{str(name).replace("-", "_"): value for name, value in each.items()} for each in found]


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Check that a table has no other keys.

    Raises: ConfigError that names the nearest.
    """
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: {key}: unknown key; {hint}")


def typed(table: Mapping[str, Any], key: str, kind: type, where: str, default: Any = None) -> Any:
    """The value of a key, of this type.

    Raises: ConfigError if it has another.
    """
    value = table.get(key, default)
    is_wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if value is not None and is_wrong:
        words = {int: "an integer", str: "a text", bool: "true or false", dict: "a table", list: "a list"}
        raise ConfigError(f"{where}: {key}: {value!r} must be {words[kind]}")
    return value
