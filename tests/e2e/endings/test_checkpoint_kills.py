"""kill -9 while a checkpoint is being written: the one before it counts, and no half of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import MOVING, Ended, has_moved, merged, rl, start, start_rl, toml, until, untrained_model, wait
from test_kill import wait_for_child

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

NUM_STEPS = 6
# 50 MB of state: writing it takes long enough to be met.
SCRATCH = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
CKPT = {"interval": 1, "weights": {"interval": NUM_STEPS}}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = untrained_model(tmp_path_factory.mktemp("model"), **SCRATCH)
    settings = {
        "max_steps": NUM_STEPS,
        "seq_len": 64,
        "model": {"name": model},
        "ckpt": CKPT,
        "orchestrator": {
            "batch_size": 4,
            "group_size": 2,
            "max_async_level": 0,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 4}},
            "env": [{"id": "envs:Vowels"}],
        },
        "trainer": {"optim": {"lr": 1e-3}},
    }
    return merged(settings, MOVING)


@pytest.fixture(scope="module")
def unbroken(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = rl(tmp_path_factory.mktemp("unbroken"), settings)
    assert has_moved(ended)
    return ended


def stopped_in_a_checkpoint(
    run: RunDir, popen: subprocess.Popen[str], pid: int, is_half: Callable[[Path], bool]
) -> int:
    """Stop a process while a checkpoint is as `is_half` says; the step."""
    while True:
        step = 0

        def is_met() -> bool:
            nonlocal step
            step = (run.latest_complete_checkpoint() or 0) + 1
            return step > 1 and is_half(run.checkpoint(step))

        until(is_met, popen, "a checkpoint that is being written", every_s=0.0)
        os.kill(pid, signal.SIGSTOP)
        if is_half(run.checkpoint(step)) and not run.complete_marker(step).exists():
            return step
        os.kill(pid, signal.SIGCONT)


def is_written(checkpoint: Path) -> bool:
    return (checkpoint / "trainer.part").is_dir()


def check_nothing_is_half(run: RunDir) -> None:
    assert [run.checkpoint(step).name for step in run.complete_checkpoints()] == sorted(
        os.listdir(run.checkpoints), key=lambda name: int(name.partition("_")[2])
    )
    assert not [*run.path.rglob("*.part"), *run.path.rglob("*.old")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("trainer", []),
        pytest.param("launcher", [], marks=pytest.mark.slow),
        pytest.param("launcher", ["--ckpt.interval", "100"], marks=pytest.mark.slow, id="never-again"),
    ],
)
def test_a_run_killed_in_a_checkpoint_goes_on_from_the_one_before_it(
    settings: dict[str, Any], unbroken: Ended, tmp_path: Path, victim: str, words: list[str]
) -> None:
    run = RunDir(tmp_path / "run")
    popen = start_rl(tmp_path, settings)
    trainer = wait_for_child(popen, "trainer")
    step = stopped_in_a_checkpoint(run, popen, trainer, is_written)
    os.kill({"trainer": trainer, "launcher": popen.pid}[victim], signal.SIGKILL)
    wait(popen)
    check_resumed(run, step, unbroken, rl(tmp_path, settings, "--resume", *words))


@pytest.mark.slow
def test_a_checkpoint_of_which_the_trainer_wrote_its_half_does_not_count(
    settings: dict[str, Any], unbroken: Ended, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    popen = start_rl(tmp_path, settings)
    orchestrator = wait_for_child(popen, "orchestrator")
    step = stopped_in_a_checkpoint(run, popen, orchestrator, is_written)
    until((run.checkpoint(step) / "trainer").is_dir, popen, "the trainer's half")
    popen.kill()
    wait(popen)
    check_resumed(run, step, unbroken, rl(tmp_path, settings, "--resume"))


def check_resumed(run: RunDir, step: int, unbroken: Ended, ended: Ended) -> None:
    assert f"resumed from step {step - 1}" in ended.output, ended.output
    assert ended.weights(NUM_STEPS) == unbroken.weights(NUM_STEPS)
    assert audit(run) == []
    check_nothing_is_half(run)


@pytest.mark.slow
def test_sft_killed_in_a_checkpoint_goes_on_from_the_one_before_it(tmp_path: Path) -> None:
    def start_sft(name: str, *words: str) -> subprocess.Popen[str]:
        settings = {
            "output_dir": tmp_path,
            "run": {"name": name},
            "max_steps": NUM_STEPS,
            "seq_len": 64,
            "batch_size": 4,
            "num_threads": 1,
            "model": {"scratch": SCRATCH},
            "data": {"type": "environment", "id": "sort-letters", "num_rows": 64},
            "ckpt": CKPT,
        }
        (tmp_path / f"{name}.toml").write_text(toml(settings))
        return start("sft", ["@", f"{name}.toml", *words], tmp_path)

    run = RunDir(tmp_path / "killed")
    popen = start_sft("killed")
    step = stopped_in_a_checkpoint(run, popen, popen.pid, is_written)
    popen.kill()
    wait(popen)
    resumed, straight = (wait(start_sft(*words)) for words in (("killed", "--resume"), ("straight",)))
    assert resumed[0] == straight[0] == 0, resumed[1] + straight[1]
    assert f"resumed from step {step - 1}" in resumed[1]
    ended = [Ended(0, "", RunDir(tmp_path / name)) for name in ("killed", "straight")]
    assert ended[0].weights(NUM_STEPS) == ended[1].weights(NUM_STEPS)
    check_nothing_is_half(run)
