"""Whole runs whose trainer is Megatron-Core in a Python of its own, with stages on a CPU; skipped without it."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from processes.add_ons import needs
from test_megatron_network import ON_CPU, find_python, needs_megatron

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))

from ports import free_ports
from runs import DEADLINE_S, Ended, merged, rl, start_rl, until, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

pytestmark = [needs_megatron, pytest.mark.slow]
NUM_STEPS = 4
SETTINGS: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "seq_len": 256,
    "ckpt": {"interval": 1, "weights": {"interval": NUM_STEPS}},
    "orchestrator": {
        "batch_size": 16,
        "group_size": 4,
        "max_async_level": 0,
        "train": {"sampling": {"max_completion_tokens": 12}},
        "env": [{"id": "reverse-text"}],
    },
    # A random policy is never rewarded; the entropy gives it something to learn.
    "trainer": {"optim": {"lr": 1e-3}, "loss": {"entropy_coef": 0.1}},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = untrained_model(tmp_path_factory.mktemp("model"), num_layers=2, num_heads=4, num_kv_heads=2)
    return merged(SETTINGS, {"model": {"name": str(model)}})


@pytest.fixture(scope="module")
def staged(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same with two stages of Megatron."""
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{ON_CPU}:$PYTHONPATH" exec "{find_python()}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    trainer = {"backend": "megatron", "interpreter": str(python), "megatron": {"pp": 2}}
    return merged(settings, {"trainer": trainer, "orchestrator": {"num_train_workers": 2}})


@pytest.fixture(scope="module")
def unbroken(staged: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return rl(tmp_path_factory.mktemp("unbroken"), staged)


PPO: dict[str, Any] = {
    "max_steps": 6,
    "seq_len": 256,
    "ckpt": {"interval": 3, "weights": {"interval": 6}},
    "orchestrator": {
        "batch_size": 32,
        "group_size": 1,
        "max_async_level": 0,
        "algo": {"type": "ppo"},
        "train": {"sampling": {"max_completion_tokens": 6}},
        "env": [{"id": "envs:Vowels"}],
    },
    "trainer": {
        "optim": {"lr": 1e-2, "eps": 1e-4},
        "loss": {"type": "ppo", "use_rollout_logprobs": False},
        "advantages": {"type": "gae", "lambd": 0.9, "kl_coef": 0.01},
        "critic": {"lr": 1e-2, "lr_warmup_steps": 2, "num_critic_only_steps": 1},
        "updates_per_step": 2,
    },
}


@needs("critic")
def test_ppo_with_two_stages_is_that_of_our_own_trainer_with_a_critic_beside_the_policy_or_apart(
    settings, staged, tmp_path: Path
) -> None:
    trainer = {key: staged["trainer"][key] for key in ("backend", "interpreter", "megatron")}
    own = merged(PPO, {"model": settings["model"]})
    theirs = merged(own, {"trainer": trainer, "orchestrator": {"num_train_workers": 1}})
    # Two updates of a step train the same samples if both pack them alike: Megatron shares no prefixes.
    own["model"] = own["model"] | {"shared_prefixes": "off"}
    apart = {"trainer": {"critic": {"placement": {"port": free_ports(1)[0]}}}}
    runs = {}
    for name, given in {"own": own, "beside": theirs, "apart": merged(theirs, apart)}.items():
        (tmp_path / name).mkdir()
        runs[name] = rl(tmp_path / name, given)
    for name in ("beside", "apart"):
        for column in ("reward/mean", "critic/value_loss", "critic/grad_norm", "critic/return/mean", "loss/mean"):
            wanted = runs["own"].column(column)
            assert runs[name].column(column) == pytest.approx(wanted, rel=1e-3, abs=1e-4), (name, column)
            assert len(wanted) >= 5, column
        assert audit(runs[name].run) == []
    assert (runs["apart"].run.checkpoint(3) / "critic" / "state.json").exists()
    assert critic_files(runs["apart"]) == critic_files(runs["beside"])
    again = {"trainer": {"critic": {"placement": {"port": free_ports(1)[0]}}}}
    (tmp_path / "rest").mkdir()
    checkpoint = str(runs["apart"].run.checkpoint(3))
    rest = rl(tmp_path / "rest", merged(theirs, again), "--resume.dir", checkpoint)
    assert critic_files(rest) == critic_files(runs["apart"])


def critic_files(ended: Ended) -> dict[str, bytes]:
    folders = ended.run.critic / "step_6", ended.run.weights_step(6)
    return {f"{folder}/{path.name}".removeprefix(str(ended.run)): path.read_bytes()
            for folder in folders for path in folder.glob("*.safetensors")}  # fmt: skip


def shards(ended: Ended) -> dict[str, bytes]:
    """The files of the last weights; each rank writes its own."""
    folder = ended.run.weights_step(NUM_STEPS)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_two_stages_of_megatron_train_like_one_rank_of_our_own(settings, unbroken: Ended, tmp_path: Path) -> None:
    own = rl(tmp_path, settings)
    for column in ("loss/mean", "optim/grad_norm", "entropy/mean", "batch/tokens"):
        assert unbroken.column(column) == pytest.approx(own.column(column), rel=1e-4, abs=1e-5), column
        assert len(own.column(column)) == NUM_STEPS
    errors = unbroken.column("canary/error")
    assert len(errors) >= NUM_STEPS - 1 and max(errors) < 1e-4
    assert all(value < 1e-6 for value in unbroken.column("mismatch_kl/max"))
    assert audit(unbroken.run) == []


def test_a_killed_run_of_megatron_resumes_and_ends_with_the_same_bits(staged, unbroken: Ended, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    popen = start_rl(tmp_path, staged)
    until(lambda: (run.latest_complete_checkpoint() or 0) >= 2, popen, "the second checkpoint")
    os.kill(popen.pid, signal.SIGKILL)
    wait(popen, DEADLINE_S)
    assert run.latest_complete_checkpoint() < NUM_STEPS
    resumed = rl(tmp_path, staged, "--resume")
    assert shards(resumed) == shards(unbroken)
    assert audit(resumed.run) == []


def test_our_own_trainer_resumes_a_run_of_megatron(settings, staged, unbroken: Ended, tmp_path: Path) -> None:
    rl(tmp_path, merged(staged, {"max_steps": 2}))
    resumed = rl(tmp_path, settings, "--resume")
    assert resumed.column("loss/mean") == pytest.approx(unbroken.column("loss/mean"), rel=1e-4, abs=1e-5)
