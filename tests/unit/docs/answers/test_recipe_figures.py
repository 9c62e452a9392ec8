"""The page of recipes says what the examples' files and READMEs say."""

from __future__ import annotations

import re
import tomllib

import pytest
from pages.blocks import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()
SMALL, REAL = PAGE.partition("## On a CPU, a published")[::2]
ROWS = re.findall(r"^\| [^|]+ \| \[(\w+)\]\([^)]+\) \|([^|]+)\|([^|]+)\|([^|]+)\|", SMALL, re.M)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_settings_and_figures_are_those_of_the_example(row):
    name, settings, sampled, greedy = row
    config = tomllib.loads((ROOT / "examples" / name / "rl.toml").read_text())
    orchestrator = config["orchestrator"]
    found = [
        config["max_steps"],
        orchestrator["batch_size"],
        orchestrator["train"]["sampling"]["max_completion_tokens"],
    ]
    assert [int(text) for text in settings.split(",")] == found
    assert config["trainer"]["optim"]["lr"] == 1e-3
    assert orchestrator.get("group_size", 8) == (1 if name == "tic_tac_toe" else 8)
    readme = (ROOT / "examples" / name / "README.md").read_text()
    for figures in (sampled, greedy):
        if "README" not in figures:
            for number in re.findall(r"\d\.\d+", figures):
                assert number in readme, number


def test_figures_of_the_language_model_are_those_of_its_page():
    readme = (ROOT / "examples" / "smollm2" / "README.md").read_text()
    lines = re.findall(r"\| `\w+\.toml`[^|]*\|([^|]+)\|([^|]+)\|([^|]+)\|", REAL)
    assert len(lines) == 7
    for line in lines:
        assert all(cell.strip() in readme for cell in line), line


def test_every_small_task_has_a_row():
    folders = {path.parent.name for path in (ROOT / "examples").glob("*/sft.toml")}
    assert {row[0] for row in ROWS} == folders - {"multi_turn_tools", "gsm8k", "broken", "service", "smollm2"}
