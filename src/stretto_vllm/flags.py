"""Print the options of the installed vLLM as the table that config/flags/table.py reads.

    python -m stretto_vllm.flags > src/stretto/config/flags/vllm.json

A test compares the file with the parser of the vLLM that is installed.
"""

from __future__ import annotations

import argparse
import sys

from stretto.config.flags.table import Flag, Table, table_text


def read_installed() -> Table:
    """The options of the installed vLLM."""
    import vllm
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    flags = [flag for action in parser._actions for flag in _flags_of(action)]
    return Table(vllm.__version__.partition("+")[0], tuple(sorted(flags, key=lambda flag: flag.name)))


def _flags_of(action: argparse.Action) -> list[Flag]:
    names = sorted(name for name in action.option_strings if name.startswith("--") and name != "--help")
    negative = {name.replace("--no-", "--", 1): name for name in names if name.startswith("--no-")}
    positive = [name for name in names if name not in negative.values()] or names
    takes = "nothing" if action.nargs == 0 else "values" if action.nargs in ("+", "*") else "value"
    if isinstance(action, argparse.BooleanOptionalAction):
        takes = "nothing"
    choices = tuple(str(choice) for choice in action.choices or ())
    return [Flag(name, takes, choices, negative.get(name)) for name in positive]


if __name__ == "__main__":
    sys.stdout.write(table_text(read_installed()))
