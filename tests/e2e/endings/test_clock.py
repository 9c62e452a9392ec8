"""`deterministic`: two runs have the same bits, whatever the load and the delays, and so has one that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import Ended, rl, start_rl, until, untrained_model, wait

from stretto.ledger.audit import audit

NUM_STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("model"))


def delayed(model: Path, level: int, **more: Any) -> dict[str, Any]:
    return {
        "max_steps": NUM_STEPS,
        "seq_len": 512,
        "deterministic": True,
        "model": {"name": str(model)},
        "ckpt": {"interval": 3, "weights": {"interval": 1}},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "max_async_level": level,
            "train": {"sampling": {"max_completion_tokens": 12}},
            "env": [{"id": "envs:Delayed"}],
        },
        "trainer": {"optim": {"lr": 3e-3}},
    } | more


def play(directory: Path, settings: dict[str, Any], *words: str) -> Ended:
    directory.mkdir(exist_ok=True)
    return rl(directory, settings, *words)


def weights(run: Ended) -> list[bytes]:
    """Those of each step; b"" for one that another run has trained."""
    steps = range(1, NUM_STEPS + 1)
    return [run.weights(step) if run.run.weights_step(step).exists() else b"" for step in steps]


@pytest.mark.heavy
@pytest.mark.parametrize("level", [0, 1, 2])
def test_delays_and_load_change_no_bit(model: Path, tmp_path: Path, level: int) -> None:
    first = play(tmp_path / "first", delayed(model, level))
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        second = play(tmp_path / "second", delayed(model, level))
    finally:
        for each in burning:
            each.kill()
            each.wait()
    assert weights(first) == weights(second)
    assert len(set(weights(first))) == NUM_STEPS, "every step has moved the weights"
    lags = first.column("off_policy/mean")
    assert lags == second.column("off_policy/mean")
    assert max(lags) == level, "generation ran ahead"


@pytest.mark.heavy
def test_a_kill_in_the_middle_changes_no_bit(model: Path, tmp_path: Path) -> None:
    straight = play(tmp_path / "straight", delayed(model, 1))
    directory = tmp_path / "killed"
    directory.mkdir()
    killed = start_rl(directory, delayed(model, 1), is_forked=False)
    until(lambda: (directory / "run" / "weights" / "step_5").exists(), killed, "weights of step 5")
    killed.kill()
    wait(killed)
    resumed = play(directory, delayed(model, 1), "--resume")
    assert weights(resumed) == weights(straight)
    assert audit(resumed.run, payloads=True) == []


@pytest.mark.heavy
def test_a_run_is_played_again_from_one_of_its_checkpoints(model: Path, tmp_path: Path) -> None:
    first = play(tmp_path / "first", delayed(model, 2))
    again = play(
        tmp_path / "again", delayed(model, 2), "--resume.dir", str(tmp_path / "first" / "run"), "--resume.step", "3"
    )
    assert weights(again)[3:] == weights(first)[3:]
