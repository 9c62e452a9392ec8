"""An environment of one's own with turns, a tool and a judge, written by the documents: it learns what is held out.

`boxes.py` and three files of settings are all that was written; environments.md, judge.md and first_hour.md were read.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from desk import copied, summary, typed
from processes.add_ons import needs

from stretto.ledger.audit import audit
from stretto_python.run import Run

pytestmark = [pytest.mark.slow, needs("frozen")]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both networks warmed up, and the run played to its end."""
    folder = copied(
        tmp_path_factory.mktemp("agent"), "boxes.py", "boxes_judge.toml", "boxes_warm_up.toml", "boxes_rl.toml"
    )
    assert "step 300/300" in typed(folder, "sft", "@", "boxes_judge.toml")
    typed(folder, "sft", "@", "boxes_warm_up.toml")
    (folder / "printed").write_text(typed(folder, "rl", "@", "boxes_rl.toml"))
    return folder


def test_the_reward_of_the_judge_rises_on_held_out_boxes_sampled_and_greedy(desk: Path) -> None:
    result = summary(desk, "boxes")
    assert result["reward_after"] > result["reward_before"] + 0.5, result
    assert result["greedy_after"] > result["greedy_before"] + 0.1, result
    assert ": improved" in (desk / "printed").read_text()


def test_what_the_judge_pays_for_is_what_was_meant(desk: Path) -> None:
    """`right` compares with the true order, which the judge only guesses."""
    right = [row["env/boxes:Boxes/right"] for row in Run(desk / "outputs" / "boxes").metrics() if row["step"] > 0]
    fifth = len(right) // 5
    assert sum(right[-fifth:]) > 1.5 * sum(right[:fifth]), right
    assert audit(Run(desk / "outputs" / "boxes").dir, payloads=True) == []


def test_looking_at_the_run_shows_the_tool_and_whether_it_learned(desk: Path) -> None:
    shown = typed(desk, "show", "outputs/boxes")
    assert ": improved" in shown and "boxes:Boxes  greedy" in shown
    replies = typed(desk, "rollouts", "outputs/boxes", "--best", "1")
    assert "look" in replies and "tool: " in replies


def test_a_later_start_asks_the_judge_for_nothing_twice(desk: Path) -> None:
    log = desk / "outputs" / "boxes" / "logs" / "orchestrator.log"
    before = counts(log.read_text())
    typed(desk, "rl", "@", "boxes_rl.toml", "--resume", "--max-steps", "251", "--no-orchestrator.eval")
    lines = log.read_text()
    assert int(re.findall(r"models.judge: (\d+) replies are known from before", lines)[-1]) == before["asked"]


def counts(log: str) -> dict[str, int]:
    """What a run says of the judge at its end; `asked` are the requests that a server answered."""
    words = re.findall(r"models.judge: (\d+) requests, (\d+) cached", log)[-1]
    requests, cached = map(int, words)
    return {"requests": requests, "cached": cached, "asked": requests - cached}
