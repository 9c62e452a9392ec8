"""Syntax trees of source files."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file.

    The garbage collector is off meanwhile: in CPython 3.11 it can start a second parse within this one (by a finalizer
    or another thread), and both share one counter, so that this one raises SystemError.
    Source: https://github.com/python/cpython/issues/106905
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(file.read_text())
    finally:
        if was_enabled:
            gc.enable()
