"""A mistake is one change of the tree, written in one place of the text."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from stretto_repair.mutate import OPERATORS, mutations

SOURCE = '''
LIMIT = 10  # not within a function: stays


def first(a, b: int = 3) -> int:
    """Text stays, 1 < 2."""
    total = 0
    for x in a:
        if x is None or (x < b and not x == 2):
            continue
        total += (x - 1) * 2 if x in a else x // b
        print(f"{x + 1}", max(x, b))
    return total


async def second(ü, flag=True):
    return [y for y in ü if flag is not False and y >= ü[0]], "é" + ü
'''


def test_a_mistake_changes_one_place_and_the_rest_stays():
    found = list(mutations(SOURCE, random.Random(0)))
    for mutation in found:
        changed = mutation.apply(SOURCE)
        lines, others = SOURCE.splitlines(), changed.splitlines()
        assert len(lines) == len(others) and ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert [number for number, (a, b) in enumerate(zip(lines, others), 1) if a != b] == [mutation.line]
    assert {mutation.kind for mutation in found} >= OPERATORS.keys() - {"truth"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x < b", "x <= b"),
        ("x is None or (x < b and not x == 2)", "x is None and (x < b and (not x == 2))"),
        ("not x == 2", "x == 2"),
        ("continue", "break"),
        ("total += (x - 1) * 2 if x in a else x // b", "pass"),
        ("x - 1", "x + 1"),
        ("max(x, b)", "max(b, x)"),
        ("return total", "return None"),
        ("y >= ü[0]", "y > ü[0]"),
        ("False", "True"),
    ],
)
def test_known_mistakes_are_found(old, new):
    assert (old, new) in {(each.old, each.new) for each in mutations(SOURCE, random.Random(0))}


@pytest.mark.parametrize("text", ["LIMIT", "10", "int = 3", "1 < 2", "x + 1", '"é" + ü'])
def test_what_is_no_place_for_a_mistake_stays(text):
    assert not [each for each in mutations(SOURCE, random.Random(0)) if each.old == text]


def test_the_order_is_that_of_the_seed():
    drawn = [list(mutations(SOURCE, random.Random(seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == set(drawn[2])


def test_a_text_that_is_not_there_is_refused():
    mutation = next(mutations(SOURCE, random.Random(0)))
    with pytest.raises(ValueError, match=f"line {mutation.line}"):
        mutation.apply("\n" + SOURCE)


@pytest.mark.heavy
def test_mistakes_in_real_modules_mean_what_was_intended():
    source = Path(random.__file__).read_text()
    for mutation, _ in zip(mutations(source, random.Random(3)), range(10)):
        assert ast.parse(mutation.apply(source))
