"""Whole runs whose environments live in worker processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from runs import DEADLINE_S, Ended, merged, rl, start_rl, until, wait
from test_ranks import build_model

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

SETTINGS = {
    "max_steps": 3,
    "seq_len": 256,
    "ckpt": {"weights": {"interval": 1}},
    "orchestrator": {
        "batch_size": 16,
        "group_size": 4,
        "max_async_level": 0,
        "train": {"sampling": {"max_completion_tokens": 6}},
    },
    "trainer": {"optim": {"lr": 1e-3}},
}


def with_envs(model: Path, envs: list[dict], **more) -> dict:
    return merged(SETTINGS, {"model": {"name": model}, "orchestrator": {"env": envs}}, more)


def workers_of(pid: int) -> list[psutil.Process]:
    """Environment workers among the descendants of a run."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "stretto.envs.workers.child" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_run_with_workers_trains_what_one_without_trains(tmp_path: Path) -> None:
    model, ended = build_model(tmp_path), []
    for name, num_workers in (("own", {}), ("workers", {"num_workers": 2})):
        (tmp_path / name).mkdir()
        envs = [{"id": "envs:Vowels"} | num_workers, {"id": "envs:Dialogue"} | num_workers]
        ended.append(rl(tmp_path / name, with_envs(model, envs)))
    own, there = ended
    assert there.column("reward/mean") == own.column("reward/mean")
    assert there.weights(3) == own.weights(3)
    assert own.weights(3) != own.weights(1)
    assert sorted(path.name for path in there.run.logs.glob("env-*")) == [
        f"env-envs:{name}-{i}.log" for name in ("Dialogue", "Vowels") for i in range(2)
    ]


def test_a_run_goes_on_when_its_workers_are_killed_and_leaves_none(tmp_path: Path) -> None:
    envs = [{"id": "envs:Dialogue", "num_workers": 2}]
    run = start_rl(tmp_path, with_envs(build_model(tmp_path), envs, max_steps=12))
    until(lambda: len(workers_of(run.pid)) == 2, run, "workers")
    first = workers_of(run.pid)
    until(lambda: (tmp_path / "run" / "weights" / "step_1").exists(), run, "step 1")
    os.kill(first[0].pid, signal.SIGKILL)
    code, output = wait(run)
    assert code == 0, output
    ended = Ended(code, output, RunDir(tmp_path / "run"))
    assert ended.summary()["steps"] == 12
    assert not audit(ended.run)
    assert "killed by SIGKILL (9)" in ended.run.log("orchestrator").read_text()
    deadline = time.monotonic() + DEADLINE_S
    while any(worker.is_running() for worker in first) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.is_running() for worker in first)


@pytest.mark.slow
def test_an_environment_that_cannot_be_built_ends_the_run_with_its_message(tmp_path: Path) -> None:
    envs = [{"id": "envs:Flaky", "num_workers": 2}]
    ended = rl(tmp_path, with_envs(build_model(tmp_path), envs), is_ok=False)
    assert ended.code and "missing a required argument: 'share'" in ended.output, ended.output


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="the extra verifiers is not installed")
def test_a_taskset_of_verifiers_is_trained_on_exactly_the_tokens_the_engine_saw(tmp_path: Path) -> None:
    """A dialogue of two turns: were one token of it not the engine's, the trainer's log-probabilities would differ."""
    ended = rl(tmp_path, with_envs(build_model(tmp_path), [{"id": "vowels-v1"}]))
    assert len(ended.column("reward/mean")) == 3
    for name in ("mismatch_kl/mean", "mismatch_kl/max"):
        assert all(0 <= value < 1e-6 for value in ended.column(name)), ended.column(name)
    with ended.ledger() as ledger:
        row = ledger.trained_rollouts(1)[0]
        rollout = ledger.group(row["group_id"]).rollouts[row["member"]]
    assert rollout.num_turns == 2 and len(rollout.branches) == 1
