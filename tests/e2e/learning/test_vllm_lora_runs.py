"""Runs that train an adapter on vLLM servers, which compute it beside their weights: learning, deaths, resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from ports import free_ports
from runs import Ended, merged, rl, start_rl, until, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`"),
]
SCRATCH = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
COMPUTED = "the adapter of [model.lora]: vLLM computes it beside its weights"


@pytest.fixture(scope="module")
def warm(warmed_up: Callable[..., Path]) -> Path:
    """A model that sorts four letters right in about half of all tries.

    At this width a run of 50 steps gains about .2 without the embeddings, which an adapter leaves as they are; at half
    of it about .1.
    """
    scratch = SCRATCH | {"hidden_size": 128, "intermediate_size": 512}
    return warmed_up(max_steps=55, scheduler={"type": "constant", "warmup_steps": 20}, model={"scratch": scratch})


def settings(start: Path, max_steps: int, **more) -> dict:
    """A run of an adapter whose engine computes it, because nothing says otherwise."""
    base = {
        "max_steps": max_steps,
        "seq_len": 256,
        "model": {"name": str(start), "lora": {"rank": 8, "alpha": 16}},
        "inference": {"engine": "vllm"},
        "orchestrator": {
            "batch_size": 128,
            "group_size": 8,
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
            "train": {"sampling": {"max_completion_tokens": 6}},
            "eval": None,
        },
        "trainer": {"optim": {"lr": 1e-3}},
    }
    return merged(base, more)


def check_versions(run: RunDir) -> None:
    """Every version that an engine computed is the trainer's, and no rollout was trained twice."""
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if "canary/error" in row]
    assert rows and max(row["canary/error"] for row in rows) < 1e-4
    assert audit(run) == []


def test_a_run_of_an_adapter_on_vllm_learns(warm: Path, tmp_path: Path) -> None:
    held_out = {"num_examples": 256, "greedy": False}
    more = {"weight_broadcast": {"type": "shm"}, "orchestrator": {"max_async_level": 0, "eval": held_out}}
    run: Ended = rl(tmp_path, settings(warm, 50, **more))
    summary = run.summary()
    assert summary["reward_after"] > summary["reward_before"] + 0.12, summary
    assert max(run.column("mismatch_kl/mean", "trainer")) < 1e-5
    check_versions(run.run)
    assert COMPUTED in (run.run.logs / "inference.log").read_text()


@pytest.mark.parametrize("transport", ["filesystem", "collective", "changes"])
def test_an_adapter_comes_by_every_other_transport_in_flight_beside_drafts(
    warm: Path, tmp_path: Path, transport: str
) -> None:
    wire = {"type": "filesystem", "delta": {}} if transport == "changes" else {"type": transport}
    wire |= {"port": free_ports(1)[0]} if transport == "collective" else {}
    more = {
        "weight_broadcast": wire,
        "inference": {"speculation": {"method": "ngram", "num_speculative_tokens": 2}},
        "orchestrator": {"batch_size": 64, "max_async_level": 2},
    }
    run = rl(tmp_path, settings(warm, 6, **more))
    check_versions(run.run)
    assert len(run.column("canary/error")) >= 5
    assert COMPUTED in (run.run.logs / "inference.log").read_text()


def test_a_mixture_whose_attention_is_adapted_is_replayed_by_the_trainer(
    warmed_up: Callable[..., Path], tmp_path: Path
) -> None:
    scratch = {**SCRATCH, "family": "qwen3_moe", "moe_intermediate_size": 64}
    mixture = warmed_up(max_steps=70, scheduler={"type": "constant", "warmup_steps": 20}, model={"scratch": scratch})
    more = {
        "model": {"lora": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
        "orchestrator": {"batch_size": 64, "max_async_level": 0},
        "trainer": {"enable_router_replay": True},
    }
    run = rl(tmp_path, settings(mixture, 4, **more))
    assert max(run.column("mismatch_kl/mean", "trainer")) < 1e-5
    check_versions(run.run)
    assert COMPUTED in (run.run.logs / "inference.log").read_text()


def test_an_engine_and_then_the_trainer_are_killed_and_the_run_is_resumed(warm: Path, tmp_path: Path) -> None:
    """An engine that comes back has the adapter of its time before it serves; so has one of a resumed run."""
    more = {
        "inference": {"deployment": {"num_replicas": 2}},
        "weight_broadcast": {"type": "shm"},
        "orchestrator": {"batch_size": 64, "client": {"liveness_interval_s": 1.0}},
        "ckpt": {"interval": 1, "keep_last": 2},
    }
    run = RunDir(tmp_path / "run")
    popen = start_rl(tmp_path, settings(warm, 100_000, **more))
    try:
        until(lambda: num_steps(run) >= 2, popen, "two steps")
        os.killpg(process_of(popen.pid, "inference_1.json").pid, signal.SIGKILL)
        until(lambda: "is back after" in log_of(run), popen, "the engine to come back")
        at_return = num_steps(run)
        until(lambda: num_steps(run) >= at_return + 2, popen, "steps with both engines again")
        os.killpg(process_of(popen.pid, "trainer").pid, signal.SIGKILL)
        code, output = wait(popen)
    finally:
        popen.kill()
    assert code != 0, output
    at_death = max(row["step"] for row in read_metrics(run.metrics("trainer")) if "loss/mean" in row)
    code, output = wait(start_rl(tmp_path, settings(warm, at_death + 3, **more), "--resume"))
    assert code == 0 and "resumed from step" in output, output
    check_versions(run)
    for number in range(2):
        assert COMPUTED in (run.logs / f"inference_{number}.log").read_text()


def num_steps(run: RunDir) -> int:
    path = run.metrics("trainer")
    return len({row["step"] for row in read_metrics(path) if "loss/mean" in row}) if path.exists() else 0


def log_of(run: RunDir) -> str:
    path = run.log("orchestrator")
    return path.read_text() if path.exists() else ""


def process_of(pid: int, word: str) -> psutil.Process:
    """The launcher's child with this word in its command."""
    [found] = [child for child in psutil.Process(pid).children() if word in " ".join(child.cmdline()[1:])]
    return found
