"""Credit per turn, on the page and as text, over a run of an orchestrator with fakes at the other ends of its wires."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer
from orchestrator_runs import config, train

import stretto
from stretto_view.commands import as_text
from stretto_view.page import conversation
from stretto_view.page.library import OpenRun


def sorting(prompt: str, rng: random.Random, version: int) -> str:
    """Sorts all letters so far, in two cases of three."""
    letters = "".join(re.findall(r"U\+?([a-z]+)", prompt))
    return "".join(sorted(letters)) if rng.random() < 2 / 3 else "no"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("stretto_games")
    cfg = config(
        tmp_path_factory.mktemp("runs"),
        env=[{"id": "alphabet-sort", "args": {"num_turns": 2, "scores_turns": True}}],
        algo={"type": "grpo", "turns": {"type": "returns"}},
        max_steps=3,
    )
    train(cfg, FakeEngine(sorting), FakeTrainer(max_steps=3))
    return cfg.run_dir.path


def test_the_page_shows_what_each_turn_earned_and_its_advantage(path: Path) -> None:
    rows = [row for row in stretto.Run(path).rollouts() if len(row["turns"]) == 2 and row["step"]]
    row = next(row for row in rows if row["turns"][0]["advantage"] != row["turns"][1]["advantage"])
    found = conversation.conversation(OpenRun(path), row["group_id"], row["member"])
    assert found["turns"] == row["turns"] and [turn["value"] for turn in row["turns"]] == [0.0, 0.5]
    [branch] = found["branches"]
    assert [turn["number"] for turn in branch["turns"] if "number" in turn] == [0, 1]
    shown = [value for value in branch["tokens"]["advantage"] if value is not None]
    wanted = {round(row["advantage"] + turn["advantage"], 4) for turn in row["turns"]}
    assert set(shown) == wanted and len(shown) == row["num_sampled_tokens"]


def test_the_text_has_a_line_per_turn(path: Path) -> None:
    row = next(row for row in stretto.Run(path).rollouts() if len(row["turns"]) == 2)
    second = row["turns"][1]
    line = f"   turn 1: reward {second['reward']:+.3f}   value +0.500   advantage {second['advantage']:+.3f}   state 1"
    assert line in as_text(row).splitlines()


def test_metrics_say_how_many_turns_have_credit_of_their_own(path: Path) -> None:
    steps = [row for row in stretto.Run(path).metrics() if row["step"] > 0]
    assert all(0.0 <= row["turns/reward"] <= 0.5 for row in steps)
    assert all(0.0 < row["turns/credited_share"] <= 1.0 for row in steps)
