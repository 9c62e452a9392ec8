"""A package of a few functions with tests, and the tasks made of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stretto_repair.make import Maker

COUNTING = '''
"""Counts things."""


def longest_run(values):
    """Length of the longest run of equal values."""
    best = length = 0
    last = object()
    for value in values:
        length = length + 1 if value == last else 1
        last = value
        if length > best:
            best = length
    return best


def histogram(values, width):
    """How many values fall into each interval of this width."""
    counts = {}
    for value in values:
        place = value // width
        counts[place] = counts.get(place, 0) + 1
    return counts


def middle(values):
    """The middle of sorted values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
'''
TESTS = """
import unittest

import pytest

from counting import histogram, longest_run, middle


@pytest.mark.parametrize(("values", "length"), [("", 0), ("a", 1), ("aab", 2)])
def test_runs(values, length):
    assert longest_run(values) == length


def test_a_run_at_the_end_counts():
    assert longest_run([1, 2, 2, 2]) == 3


def test_runs_of_one():
    assert longest_run("abc") == 1


class TestHistogram(unittest.TestCase):
    def test_values_are_counted(self):
        self.assertEqual(histogram([1, 2, 11], 10), {0: 2, 1: 1})

    def test_negative_values_have_places(self):
        self.assertEqual(histogram([-1, 1], 10), {-1: 1, 0: 1})

    def test_nothing_has_no_place(self):
        self.assertEqual(histogram([], 10), {})


def test_the_middle_of_three():
    assert middle([3, 1, 2]) == 2


def test_the_middle_of_four_is_between():
    assert middle([4, 1, 2, 3]) == 2.5


def test_nothing_has_no_middle():
    assert middle([]) is None


def test_that_is_wrong_from_the_start():
    assert middle([1]) == 7
"""


def write_package(folder: Path) -> Path:
    """The package as a directory counting-1.0."""
    package = folder / "counting-1.0"
    (package / "src" / "counting").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "src" / "counting" / "__init__.py").write_text(COUNTING.lstrip())
    (package / "tests" / "test_counting.py").write_text(TESTS.lstrip())
    (package / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--cov=counting"\n')
    return package


def make_bank(folder: Path, num_tasks: int = 4) -> Path:
    """A bank with tasks of the package."""
    bank = folder / "bank"
    asyncio.run(Maker(bank).add(str(write_package(folder)), num_tasks))
    return bank
