"""Lines of keys: the scanner finds every key that the parser finds, on the line where it was written."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.reading.lines import json_lines, toml_lines

TRICKY = '''# a comment with [brackets] and = signs
a = "text with # and ] and \\" quote"   # 2
b.c."d e" = [1, # one
  2, { x = "}", y = [3,
    4] } ]
long = """
[not.a.table]
z = 1 \\""" still text"""
raw = \'\'\'
it''s # raw
\'\'\'
when = 1979-05-27 07:32:00
[ table . "quoted.key" ]
k = true
[[list]]
id = 1
[list.sub]
id = 2
[[list.inner]]
id = 3
[[list]]
id = 4
[[list.inner]]
id = 5
'''


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every path of parsed data but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([at] if at else []) + [path for key, item in items for path in paths(item, (*at, key))]


def test_every_key_of_a_tricky_document_is_found_on_its_line() -> None:
    lines = toml_lines(TRICKY)
    assert set(paths(tomllib.loads(TRICKY))) <= set(lines)
    text = TRICKY.split("\n")
    expected = {
        ("a",): 'a = "text',
        ("b", "c", "d e"): 'b.c."d e"',
        ("b", "c", "d e", 1): "  2, {",
        ("b", "c", "d e", 2, "y", 1): "    4]",
        ("long",): 'long = """',
        ("raw",): "raw = ",
        ("when",): "when = ",
        ("table", "quoted.key", "k"): "k = true",
        ("list", 0, "id"): "id = 1",
        ("list", 0, "sub", "id"): "id = 2",
        ("list", 0, "inner", 0, "id"): "id = 3",
        ("list", 1, "id"): "id = 4",
        ("list", 1, "inner", 0, "id"): "id = 5",
    }
    for path, start in expected.items():
        assert text[lines[path] - 1].startswith(start), path


SCALARS = st.one_of(st.integers(), st.booleans(), st.text(st.characters(codec="utf-8"), max_size=8))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@pytest.mark.heavy
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.sampled_from([None, 2]))
def test_every_path_of_a_json_document_is_found(data: dict[str, Any], indent: int | None) -> None:
    lines = json_lines(json.dumps(data, indent=indent))
    assert set(paths(data)) <= set(lines)
    if indent is None:
        assert set(lines.values()) <= {1}


@pytest.mark.heavy
@given(st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), min_size=1, unique=True), st.integers(0, 3))
def test_keys_stand_where_they_were_written(names: list[str], gap: int) -> None:
    blank = "\n" * gap
    lines = toml_lines(blank.join(f"{name} = 'x'\n" for name in names))
    assert lines == {(name,): 1 + index * (1 + gap) for index, name in enumerate(names)}
