"""docs/troubleshooting.md holds: every message on it is one that the code prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from syntax import tree_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.*)`$", PAGE, re.M)


@cache
def printed() -> tuple[str, ...]:
    """Every text in the source but docstrings; what an f-string or the logger fills in is `...`."""
    found = set()
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "..." for each in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[.\d]*[sdgfr]", "...", node.value))
    return tuple(sorted(text for text in found if "\n\n" not in text))


@pytest.mark.heavy
@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_prints_this_message(message):
    pieces = [piece.strip() for piece in message.split("...")]
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.S)
    assert max(map(len, pieces)) >= 8, "too short to be found by searching"
    assert any(pattern.search(text) for text in printed())


def test_there_are_many_and_each_stands_once():
    assert len(MESSAGES) >= 25 and len(set(MESSAGES)) == len(MESSAGES)
