"""A GRPO script of TRL's carried over by docs/from_trl.md: rows and reward functions untouched, the reward rises."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from desk import HERE, copied, summary, typed
from letters import rows
from processes import forked
from runs import DEADLINE_S

from stretto_python.run import Run

PAGE = HERE.parents[2] / "docs" / "from_trl.md"
NOTHING_TO_CARRY = {"args", "eval_strategy", "report_to"}


def desk(folder: Path, sorter: Path, *names: str) -> Path:
    (folder / "warmed-up").symlink_to(sorter)
    return copied(folder, *names)


def test_every_setting_of_the_script_has_a_row_on_the_page() -> None:
    calls = [node for node in ast.walk(ast.parse((HERE / "trl_script.py").read_text())) if isinstance(node, ast.Call)]
    settings = {
        word.arg
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id.startswith("GRPO")
        for word in call.keywords
    }
    page = PAGE.read_text()
    assert len(settings) > 20
    assert [name for name in settings - NOTHING_TO_CARRY if f"`{name}" not in page] == []


@pytest.mark.slow
def test_the_script_with_the_same_functions_trains_and_improves(sorter: Path, tmp_path: Path) -> None:
    folder = desk(tmp_path, sorter, "letters.py", "carried_script.py")
    pipe = subprocess.PIPE
    popen = forked.Popen([sys.executable, "carried_script.py"], cwd=folder, stdout=pipe, stderr=pipe, text=True)
    printed, errors = popen.communicate(timeout=2 * DEADLINE_S)
    assert popen.returncode == 0, printed + errors
    result = summary(folder, "letters")
    assert result["reward_after"] > result["reward_before"] + 0.3, result
    assert result["greedy_after"] > result["greedy_before"] + 0.05, result
    last = Run(folder / "outputs" / "letters").metrics()[-2]
    own = [f"env/dataset/reward_{name}" for name in ("is_right", "places", "length_is_four")]
    assert all(name in last for name in own), sorted(last)


@pytest.mark.slow
def test_the_same_as_a_file_trains_and_improves(sorter: Path, tmp_path: Path) -> None:
    folder = desk(tmp_path, sorter, "carried_rl.toml", "my_rewards.py")
    for name, first, last in (("train", 0, 1200), ("held_out", 1200, 1328)):
        lines = [json.dumps({"prompt": row["prompt"], "label": row["answer"]}) for row in rows(first, last)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    assert ": improved" in typed(folder, "rl", "@", "carried_rl.toml")
    result = summary(folder, "letters-by-file")
    assert result["reward_after"] > result["reward_before"] + 0.3, result
    assert result["greedy_after"] > result["greedy_before"] + 0.05, result
