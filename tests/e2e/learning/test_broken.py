"""Runs that go wrong on purpose (examples/broken): the console says what, and what to try."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.add_ons import needs
from runs import start, wait

pytestmark = [pytest.mark.slow, needs("doctor")]
EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ["--orchestrator.batch-size", "64", "--no-orchestrator.eval"]
LETTERS = '[{"id": "sort-letters", "args": {"num_letters": 4}}]'


def said(name: str, model: Path, directory: Path) -> list[str]:
    files = ["@", str(EXAMPLES / "sort_letters" / "rl.toml"), "@", str(EXAMPLES / "broken" / f"{name}.toml")]
    words = [*files, *SMALL, "--orchestrator.env", LETTERS, "--model.name", str(model), "--output-dir", str(directory)]
    code, output = wait(start("rl", words, directory))
    assert code == 0, output
    return output.splitlines()


def test_a_learning_rate_that_is_far_too_high(sorter: Path, tmp_path: Path) -> None:
    lines = said("too_fast", sorter, tmp_path)
    warnings = [line for line in lines if line.startswith("warning (")]
    assert sum("the policy moved too far in step" in line for line in warnings) == 1, lines
    assert any("likely: " in line and "the policy moved too far in step" in line for line in lines), lines


def test_replies_that_are_cut_before_they_can_be_right(sorter: Path, tmp_path: Path) -> None:
    lines = said("cut_short", sorter, tmp_path)
    warnings = [line for line in lines if line.startswith("warning (")]
    assert sum("replies are truncated at max_completion_tokens = 2" in line for line in warnings) == 1, lines
    assert sum("of the groups have equal rewards" in line for line in warnings) == 1, lines
    assert any("did not improve beyond its noise" in line for line in lines), lines
