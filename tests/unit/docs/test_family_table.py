"""The column "tested here" of the families: what the tests' own parameters say."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

TESTS = Path(__file__).parents[2]
for room in (
    ".",
    "dist",
    "contract",
    "contract/families",
    "unit/inference",
    "unit/inference/families",
    "unit/inference/vision",
    "unit/models",
):
    sys.path.append(str(TESTS / room))

PAGE = TESTS.parent / "docs" / "add_a_model.md"
OTHER_CONTRACTS = ("qwen3", "qwen3_moe")
"""Served by vLLM in the contract tests that have no parameter for it."""
AXES = ("fsdp", "ep", "ulysses", "ring", "tp")
WORDS = ("transformers", *AXES, "critic", "engine", "vLLM", "adapters", "choices", "images")


@cache
def coverage() -> dict[str, set[str]]:
    """By `model_type`: the words of WORDS that hold."""
    import engine_runs
    import mesh_runs
    import test_contract_families
    import test_contract_vision
    import test_engine_families
    import test_engine_fast
    import test_engine_vision
    import test_models_families
    from cases.vision import VISION_CASES

    found: dict[str, set[str]] = defaultdict(set)
    for family, *_ in (*test_models_families.CASES.values(), *VISION_CASES.values()):
        found[family].add("transformers")
    for case in mesh_runs.CASES:
        words = found[mesh_runs.family_of(case.kind)]
        words |= {axis for axis in ("ep", "tp") if case.model.get(axis, 1) != 1}
        words |= {case.model.get("cp_style", "ulysses")} if case.model.get("cp", 1) > 1 else {"fsdp"}
        words |= {"adapters"} if case.kind.startswith("lora") else set()
        words |= {"critic"} if case.kind.startswith("ppo") else set()
        words |= {"choices"} if mesh_runs.is_replayed(case.kind) else set()
        words |= {"images"} if case.kind in mesh_runs.VISION else set()
    for family in test_engine_families.NEW:
        found[family] |= {"engine", "adapters"}
    shapes = [shape.get("family", "qwen3") for shape in test_engine_fast.SHAPES.values()]
    for family in shapes:
        found[family].add("engine")
    for family, *_ in test_engine_vision.VISION_CASES.values():
        found[family] |= {"engine", "images"}
    for family in (*test_contract_families.FAMILIES, *test_contract_vision.FAMILIES, *OTHER_CONTRACTS):
        found[family].add("vLLM")
    for family in test_contract_vision.FAMILIES:
        if test_contract_vision.build(family, 0).config.moe is not None:
            found[family].add("choices")
    for family in test_engine_families.NEW:
        if engine_runs.build_varied(family).config.moe is not None:
            found[family].add("choices")
    return found


def rows() -> list[tuple[list[str], str]]:
    """The families of each row of the table, and its last cell."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `(?!model_type)", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(re.findall(r"`(\w+)`", row[0]), row[-1]) for row in cells]


def test_every_family_is_in_one_row():
    from stretto.families.table import FAMILIES

    named = [family for families, _ in rows() for family in families]
    assert sorted(named) == sorted(FAMILIES)


def test_every_family_is_compared_with_transformers():
    from stretto.families.table import FAMILIES

    missing = [family for family in FAMILIES if "transformers" not in coverage()[family]]
    assert not missing, f"{missing}: add cases to tests/unit/models/test_models_families.py"


@pytest.mark.parametrize("row", range(len(rows())))
def test_a_row_says_what_the_tests_run(row):
    families, cell = rows()[row]
    expected = set.intersection(*(coverage()[family] for family in families))
    assert cell == ", ".join(word for word in WORDS if word in expected)
