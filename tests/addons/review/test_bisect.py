"""Searching for what makes a step differ; tests/e2e/endings/test_bisect_runs.py searches commits and runs."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from stored_runs import write_run

from stretto.base.errors import ConfigError
from stretto_python.run import Run
from stretto_review.bisect import DIFFERS, SAME, Change, bisect, changes_of_run, changes_of_words, fewest
from stretto_review.replay import NOT_PLAYED

CHANGES = [Change(f"--key-{i} 1", (f"--key-{i}", "1")) for i in range(100)]


@pytest.mark.parametrize("seed", range(20))
def test_the_fewest_changes_are_found_in_few_trials(seed: int) -> None:
    source = random.Random(seed)
    needed = set(source.sample(range(100), source.randint(1, 4)))
    trials = 0

    def outcome(chosen: list[Change]) -> int:
        nonlocal trials
        trials += 1
        return DIFFERS if needed <= {CHANGES.index(each) for each in chosen} else SAME

    assert {CHANGES.index(each) for each in fewest(CHANGES, outcome)} == needed
    assert trials <= len(needed) * (math.ceil(math.log2(100)) + 1)


def test_a_change_that_needs_another_one_is_tried_with_it() -> None:
    def outcome(chosen: list[Change]) -> int:
        at = {CHANGES.index(each) for each in chosen}
        if 60 in at and 20 not in at:
            return NOT_PLAYED
        return DIFFERS if 60 in at else SAME

    assert fewest(CHANGES, outcome) == [CHANGES[20], CHANGES[60]]


def test_each_flag_is_a_change_with_its_values() -> None:
    words = ["--a.b", "1", "--is-c", "--d", "x", "y"]
    assert [each.words for each in changes_of_words(words)] == [("--a.b", "1"), ("--is-c",), ("--d", "x", "y")]


def test_changes_of_a_run_are_those_of_its_training(tmp_path: Path) -> None:
    def section(**more):
        return {"algo": {"type": "grpo"}, "group_size": 8, "env": [{"id": "a", "args": {"n": 1}}]} | more

    ours = {
        "orchestrator": section(concurrency=4),
        "trainer": {"optim": {"lr": 1.0, "betas": [0.9, 0.95]}},
        "env_vars": {},
    }
    other = write_run(
        tmp_path / "two",
        4,
        config={
            "orchestrator": section(concurrency=8, env=[{"id": "a", "args": {"n": 2}}]),
            "trainer": {"optim": {"lr": 0.5, "betas": [0.9, 0.99]}, "loss": None},
            "run": {"name": "two"},
            "env_vars": {"WANDB_API_KEY": "s3cret"},
        },
    )
    found = changes_of_run(write_config(tmp_path / "one", ours), Run(other))
    assert [each.words for each in found] == [
        ("--orchestrator.env", '[{"id": "a", "args": {"n": 2}}]'),
        ("--trainer.optim.lr", "0.5"),
        ("--trainer.optim.betas", "[0.9, 0.99]"),
    ]


def write_config(path: Path, config: dict) -> dict:
    return Run(write_run(path, 4, config=config)).config


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["{run}", "--trainer.optim.lr", "1"], "--bundle N"),
        (["{bundle}"], "--commits.*--changes-of"),
        (["{bundle}", "--commits", "a..b", "--changes-of", "{run}"], "--commits.*--changes-of"),
        (["{bundle}", "--trainer.optim.lr"], "no bundle"),
        (["{bundle}", "--commit", "a..b"], "--commit: unknown flag; did you mean --commits"),
        (["{bundle}", "--commits", "a..b", "--tolerance", "-1"], "--tolerance -1: give 0 or more"),
        (["{bundle}", "--commits", "a..b", "--repository", "/"], "/ is no git repository; name one with --repository"),
    ],
)
def test_what_cannot_be_searched_is_said(words: list[str], match: str, tmp_path: Path) -> None:
    run, bundle = write_run(tmp_path / "one", 4), tmp_path / "step_1.bundle"
    bundle.write_text("")
    with pytest.raises(ConfigError, match=match):
        bisect([word.format(run=run, bundle=bundle) for word in words])
