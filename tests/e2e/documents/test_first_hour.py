"""The pages for the first hour keep their promise: the task that they show is learned, and a new project too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages.blocks import blocks
from processes import forked
from runs import DEADLINE_S, start, wait


@pytest.mark.slow
def test_the_task_of_the_first_hour_is_learned_and_looked_at(workplace: Path) -> None:
    [*_, script] = [block.text for block in blocks("python") if block.page == "docs/first_hour.md"]
    code, output = wait(start("rl", ["@", "vowels.toml", "--clean"], workplace))
    assert code == 0, output
    (workplace / "look.py").write_text(script)
    words, pipe = [sys.executable, "look.py"], subprocess.PIPE
    popen = forked.Popen(words, cwd=workplace, stdout=pipe, stderr=pipe, text=True)
    printed, errors = popen.communicate(timeout=DEADLINE_S)
    assert popen.returncode == 0 and float(printed.splitlines()[0]) > 0.8, printed + errors
    assert len(printed.splitlines()) >= 4 and ": improved" in output


@pytest.mark.slow
def test_its_settings_do_not_harm_another_task(workplace: Path) -> None:
    """The letters, which the model of the demo sorts right most of the time if the likeliest token is taken."""
    words = ["--orchestrator.env", '[{"id": "sort-letters"}]', "--run.name", "letters", "--orchestrator.eval", "{}"]
    code, output = wait(start("rl", ["@", "vowels.toml", "--clean", *words], workplace))
    assert code == 0 and "ledger " in output and "7 promises kept" in output, output
    summary = json.loads((workplace / "outputs" / "letters" / "summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.05, summary
    assert summary["greedy_after"] > summary["greedy_before"] - 0.1, summary


def train_a_new_project(folder: Path, *words: str) -> dict[str, float]:
    """`stretto init`, then what its README says, with other words behind; the run's summary."""
    code, output = wait(start("init", ["mine"], folder))
    assert code == 0 and "rl @ rl.toml" in output
    for verb in ("sft", "rl"):
        code, output = wait(start(verb, ["@", f"{verb}.toml", *words], folder / "mine"))
        assert code == 0, output
    return json.loads((folder / "mine" / "outputs" / "vowels" / "summary.json").read_text())


def test_a_new_project_trains(tmp_path: Path) -> None:
    assert train_a_new_project(tmp_path, "--max-steps", "3")["steps"] == 3


@pytest.mark.slow
def test_a_new_project_learns(tmp_path: Path) -> None:
    summary = train_a_new_project(tmp_path)
    assert summary["reward_after"] > summary["reward_before"] + 0.3, summary
