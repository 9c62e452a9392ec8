"""Print the options of a Megatron-LM as the table that flags/megatron.py reads.

    python src/stretto_vime/flags/megatron_parser.py > src/stretto_vime/flags/megatron.json

It needs the Python that Megatron-LM runs in, and nothing else: megatron-core has the parser since 0.19.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.metadata
import json
import sys
from typing import Any

KINDS = {int: "integer", float: "number"}


def table() -> str:
    """The options that Python's Megatron-LM has, as JSON with one option per line."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    rows = sorted((row for action in parser._actions for row in _rows(action)), key=lambda row: str(row["name"]))
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'{{"version": "{_version()}", "flags": [\n{lines}\n]}}\n'


def _version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        from megatron.core import package_info

        return str(package_info.__version__)


def _rows(action: argparse.Action) -> list[dict[str, Any]]:
    """An entry for each spelling; both forms of a switch that can be on or off are one."""
    names = [name for name in action.option_strings if name.startswith("--")]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [{"name": names[0], "takes": "nothing", "negation": names[1]}]
    if action.nargs == 0:
        return [{"name": name, "takes": "nothing"} for name in names]
    row: dict[str, Any] = {"takes": "value" if action.nargs is None else "values"}
    if action.choices:
        row["choices"] = [_word(choice) for choice in action.choices]
    if action.type in KINDS:
        row["kind"] = KINDS[action.type]  # type: ignore[index]  # a function otherwise
    if action.default is not None:
        row["default"] = _default(action.default)
    return [{"name": name} | row for name in names]


def _default(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_default(each) for each in value]
    return value if isinstance(value, bool | int | float) and not isinstance(value, enum.Enum) else _word(value)


def _word(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what Megatron-LM prints as it is imported
        found = table()
    sys.stdout.write(found)
