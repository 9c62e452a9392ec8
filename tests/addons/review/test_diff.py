"""`stretto diff`: what was changed is named at its step, with both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from stored_runs import word, write_run

from stretto.base.paths import RunDir
from stretto_review.diff import diff, difference_text

GROUPS = 12


def told(one: Path, two: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The first difference."""
    status = diff([str(one), str(two), "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert status == int(bool(found["differences"]))
    return found["differences"][0] if found["differences"] else {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "one", GROUPS)


def changed_at(group: int, member: int, change: Callable[[str], str]) -> Callable[[int, int], str]:
    return lambda g, m: change(word(g, m)) if (g, m) == (group, member) else word(g, m)


def test_equal_runs_have_no_difference(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(run, write_run(tmp_path / "two", GROUPS), capsys) == {}


def test_a_check_of_another_moment_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which version the latest check was of depends on when the step's metrics were written."""
    runs = [write_run(tmp_path / name, GROUPS) for name in ("one", "two")]
    for number, path in enumerate(runs, start=1):
        rows = [{"time": 0.0, "step": step, "canary/error": step * number * 1e-7} for step in (1, 2, 3)]
        RunDir(path).metrics("trainer").parent.mkdir(exist_ok=True)
        RunDir(path).metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert told(runs[0], runs[1], capsys) == {}


def test_one_flipped_token_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "two", GROUPS, reply=changed_at(6, 3, lambda text: text[:-1] + "z"))
    found = told(run, other, capsys)
    assert (found["step"], found["quantity"]) == (2, "token") and found["where"].endswith("of g6.3")
    assert word(6, 3)[-1] in found["first"] and "'z'" in found["second"]


def test_a_changed_reward_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = word(9, 2)
    assert sum(word(g, m) == target for g in range(GROUPS) for m in range(8)) == 1
    other = write_run(tmp_path / "two", GROUPS, reward=lambda text: 7.0 if text == target else float("a" in text[:2]))
    found = told(run, other, capsys)
    assert (found["step"], found["quantity"], found["where"]) == (3, "reward", "g9.2")
    assert (found["first"], found["second"]) == (float("a" in target[:2]), 7.0)


def test_a_reordered_batch_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = [0, 1, 2, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    found = told(run, write_run(tmp_path / "two", GROUPS, order=order), capsys)
    assert (found["step"], found["quantity"]) == (2, "order")
    assert (found["first"], found["second"]) == ([4, 5, 6, 7], [4, 5, 6, 8])


def test_another_seed_is_named_by_the_first_draw(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "two", GROUPS, first_task=5, config={"seed": 1})
    found = told(run, other, capsys)
    assert (found["step"], found["quantity"], found["where"]) == (1, "draw", "draw 0")
    assert (found["first"], found["second"]) == ("train-0", "train-5")
    diff([str(run), str(other)])
    assert "config  seed: 0 and 1" in capsys.readouterr().out


def test_log_probabilities_are_compared_with_a_tolerance(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "two", GROUPS, logprob=lambda step: -0.5 if step < 3 else -0.5001)
    found = told(run, other, capsys)
    assert (found["step"], found["quantity"]) == (3, "logprob")
    assert told(run, other, capsys, "--tolerance", "0.001") == {}


def with_metrics(run: Path, rate: float, norm_at_2: float) -> Path:
    rows = [
        {"step": n, "optim/lr": rate, "optim/grad_norm": norm_at_2 if n == 2 else 1.0, "time/step": n * rate}
        for n in (1, 2, 3)
    ]
    path = RunDir(run).metrics("trainer")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"time": 0.0, **row}) + "\n" for row in rows))
    return run


def test_another_rate_and_another_gradient_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = (
        with_metrics(write_run(tmp_path / name, GROUPS), rate, norm)
        for name, rate, norm in (("one", 1e-3, 1.0), ("two", 2e-3, 1.0), ("three", 1e-3, 1.5))
    )
    found = told(one, two, capsys)
    assert (found["step"], found["quantity"], found["where"], found["second"]) == (1, "metric", "optim/lr", 2e-3)
    found = told(one, three, capsys)
    assert (found["step"], found["quantity"], found["where"], found["second"]) == (2, "metric", "optim/grad_norm", 1.5)


def test_weights_are_compared_by_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, GROUPS) for name in ("one", "two")]
    for index, run in enumerate(runs):
        for step in (1, 2):
            tensors = {"head.weight": np.ones((2, 3), np.float32), "norm.weight": np.ones(4, np.float16)}
            tensors["head.weight"][1, 2] += index * (step == 2)
            directory = RunDir(run).weights_step(step)
            directory.mkdir(parents=True)
            save_file(tensors, directory / "model.safetensors")
    found = told(*runs, capsys)
    assert (found["step"], found["quantity"], found["where"]) == (2, "weight", "head.weight[1, 2]")
    assert (found["first"], found["second"]) == (1.0, 2.0)


def test_weights_that_were_not_exported_are_compared_as_they_were_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, last: str, how: str = "shm/1/crc32") -> Path:
        return write_run(tmp_path / name, GROUPS, fingerprint=lambda step: f"{how}/{last if step == 2 else 'aa'}")

    one = run("one", "ab")
    assert told(one, run("same", "ab"), capsys) == {}
    found = told(one, run("two", "cd"), capsys)
    assert (found["step"], found["quantity"], found["second"]) == (2, "weight", "shm/1/crc32/cd")
    assert told(one, run("other way", "cd", "filesystem/2/crc32"), capsys) == {}


def test_what_ended_since_the_last_batch_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which groups that is goes by when the batch was shipped: a run that was resumed counts them otherwise."""
    run, other = (write_run(tmp_path / name, GROUPS) for name in ("one", "two"))
    names = ("groups/drawn", "outcomes/reply_cut", "reward/mean", "reward/words/mean", "batch/words", "env/words/x")
    for number, path in enumerate((run, other)):
        rows = [{"time": 0.0, "step": step, "batch/tokens": 7, **dict.fromkeys(names, number)} for step in (1, 2, 3)]
        RunDir(path).metrics("orchestrator").parent.mkdir(exist_ok=True)
        RunDir(path).metrics("orchestrator").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert told(run, other, capsys) == {}
    path = RunDir(other).metrics("orchestrator")
    path.write_text(path.read_text().replace('"batch/tokens": 7', '"batch/tokens": 8', 1))
    assert told(run, other, capsys)["where"] == "batch/tokens"


def test_groups_whose_tokens_are_gone_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(tmp_path / name, GROUPS) for name in ("one", "two"))
    RunDir(two).segment(0).unlink()
    assert diff([str(one), str(two)]) == 0
    assert f"NOT COMPARED: tokens, log-probabilities and rewards of {GROUPS} groups" in capsys.readouterr().out


def test_what_of_the_steps_was_compared_is_said_beside_their_number() -> None:
    first, second = difference_text([], 2, 1, " of training").splitlines()
    assert first == "NO DIFFERENCE in 2 steps of training" and "rewards of one group, whose" in second


def test_steps_that_only_one_run_has_are_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff([str(run), str(write_run(tmp_path / "two", GROUPS - 4))]) == 1
    said = capsys.readouterr().out
    assert "NO DIFFERENCE in 2 steps" in said and "NOT COMPARED: the steps that only one of them has (3 and 2)" in said
