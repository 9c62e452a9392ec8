"""Real runs on real vLLM servers, and on several engines: rewards rise, weights are the trainer's, engines may die."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from ports import free_ports
from runs import Ended, merged, rl, start, start_rl, until, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics
from stretto_clusters.engines import fleet_of

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")

SCRATCH = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
SOLVED = {"type": "environment", "id": "reverse-text", "num_rows": 4096}
RUN = {
    "max_steps": 30,
    "seq_len": 2048,
    "orchestrator": {
        "batch_size": 256,
        "group_size": 8,
        "env": [{"id": "reverse-text"}],
        "train": {"sampling": {"max_completion_tokens": 8}},
        "eval": {"num_examples": 128, "greedy": False},
    },
    "trainer": {"optim": {"lr": 1e-3}},
}


@pytest.fixture(scope="module")
def warm(warmed_up: Callable[..., Path]) -> Path:
    """A model that reverses one text in eight or so: something to reinforce."""
    return warmed_up(max_steps=70, batch_size=64, model={"scratch": SCRATCH}, data=SOLVED)


@pytest.fixture(scope="module")
def mixture(warmed_up: Callable[..., Path]) -> Path:
    scratch = {**SCRATCH, "family": "qwen3_moe", "moe_intermediate_size": 64}
    return warmed_up(max_steps=70, batch_size=64, model={"scratch": scratch}, data=SOLVED)


def assert_learned(run: Ended) -> None:
    summary = run.summary()
    assert summary["reward_after"] > summary["reward_before"] + 0.1, summary
    errors = run.column("canary/error")
    assert len(errors) >= 30 and max(errors) < 1e-4
    assert len(run.column("canary/rollout_error")) >= 25 and max(run.column("canary/rollout_error")) < 1e-4
    assert audit(run.run) == []


@pytest.mark.slow
@needs_vllm
def test_a_run_on_vllm_learns_with_weights_from_files(warm: Path, tmp_path: Path) -> None:
    more = {
        "model": {"name": str(warm)},
        "inference": {"engine": "vllm"},
        "weight_broadcast": {"type": "filesystem"},
        "orchestrator": {"max_async_level": 0},
    }
    run = rl(tmp_path, merged(RUN, more))
    assert_learned(run)
    # Synchronous: sampler and trainer hold the same weights, and differ by rounding alone.
    assert max(run.column("mismatch_kl/mean", "trainer")) < 1e-5


@needs_vllm
@pytest.mark.slow
def test_a_run_on_vllm_learns_with_weights_that_are_broadcast_in_flight(warm: Path, tmp_path: Path) -> None:
    more = {
        "model": {"name": str(warm)},
        "inference": {"engine": "vllm"},
        "weight_broadcast": {"type": "collective", "port": free_ports(1)[0]},
        "orchestrator": {"max_async_level": 2},
        "max_steps": 45,  # with older data it learns later
    }
    run = rl(tmp_path, merged(RUN, more))
    assert_learned(run)
    # Replies that were under way when weights came have tokens of both versions.
    assert max(run.column("mismatch_kl/mean", "trainer")) > 1e-6


@pytest.mark.slow
@needs_vllm
def test_a_mixture_on_vllm_is_replayed_by_the_trainer_whose_ranks_both_send_it(mixture: Path, tmp_path: Path) -> None:
    more = {
        "max_steps": 5,
        "model": {"name": str(mixture)},
        "inference": {"engine": "vllm"},
        "weight_broadcast": {"type": "collective", "port": free_ports(1)[0]},
        "orchestrator": {"batch_size": 64, "max_async_level": 0, "eval": None, "num_train_workers": 2},
        "trainer": {"enable_router_replay": True, "model": {"ep": 2}},
    }
    run = rl(tmp_path, merged(RUN, more))
    assert max(run.column("mismatch_kl/mean", "trainer")) < 1e-5
    errors = run.column("canary/error")
    assert len(errors) >= 5 and max(errors) < 1e-4
    with run.ledger() as ledger:
        row = next(iter(ledger.trained_rollouts(1)))
        branch = ledger.group(row["group_id"]).rollouts[row["member"]].branches[0]
    assert branch.routed_experts.shape == (len(branch.token_ids), 2, 2)
    assert branch.routed_experts[:-1].max() < 8


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("transport", ["filesystem", "collective"])
def test_a_mixture_on_vllm_learns(transport: str, mixture: Path, tmp_path: Path) -> None:
    port = {"port": free_ports(1)[0]} if transport == "collective" else {}
    more = {
        "model": {"name": str(mixture)},
        "inference": {"engine": "vllm"},
        "weight_broadcast": {"type": transport, **port},
        "orchestrator": {"max_async_level": 0},
        "trainer": {"enable_router_replay": True},
    }
    run = rl(tmp_path, merged(RUN, more))
    assert_learned(run)
    assert max(run.column("mismatch_kl/mean", "trainer")) < 1e-5


@pytest.mark.slow
@needs_vllm
def test_vllm_engines_of_two_sizes_get_every_version_by_broadcast(warm: Path, tmp_path: Path) -> None:
    groups = [{"overrides": {"max_num_seqs": 64}}, {"tp": 2, "overrides": {"async_scheduling": False}}]
    more = {
        "max_steps": 4,
        "model": {"name": str(warm)},
        "inference": {"engine": "vllm", "deployment": {"type": "groups", "groups": groups}},
        "weight_broadcast": {"type": "collective", "port": free_ports(1)[0]},
        "orchestrator": {"batch_size": 64, "max_async_level": 0, "eval": None},
    }
    run = rl(tmp_path, merged(RUN, more))
    assert max(run.column("mismatch_kl/mean", "trainer")) < 1e-5
    errors = run.column("canary/error")
    assert len(errors) >= 4 and max(errors) < 1e-4, "of every engine"
    logs = [(run.run.logs / f"inference_{i}.log").read_text() for i in range(2)]
    assert "tensor_parallel_size=2" in logs[1] and "tensor_parallel_size=2" not in logs[0]


@pytest.mark.slow
@needs_vllm
def test_two_vllm_engines_behind_a_router_one_killed_and_back(warm: Path, tmp_path: Path) -> None:
    more = {
        "max_steps": 100000,
        "model": {"name": str(warm)},
        "inference": {"engine": "vllm", "deployment": {"num_replicas": 2}},
        "weight_broadcast": {"type": "collective", "join_timeout_s": 5.0},
        "orchestrator": {"eval": None, "client": {"liveness_interval_s": 1.0}},
    }
    popen = start_rl(tmp_path, merged(RUN, more))
    run = RunDir(tmp_path / "run")
    try:
        until(lambda: num_steps(run) >= 3, popen, "three steps")
        [victim] = [p for p in processes_of(popen.pid) if "inference_1.json" in " ".join(p.cmdline())]
        os.killpg(victim.pid, signal.SIGKILL)
        until(lambda: "is down" in log(run, "orchestrator"), popen, "notice that an engine is down")
        at_death = num_steps(run)
        until(lambda: num_steps(run) >= at_death + 3, popen, "steps with one engine")
        until(lambda: "is back after" in log(run, "orchestrator"), popen, "the engine to come back")
        at_return = num_steps(run)
        until(lambda: num_steps(run) >= at_return + 3, popen, "steps with both engines again")
        popen.send_signal(signal.SIGINT)
        code, output = wait(popen)
    finally:
        popen.kill()
    assert code == 0, output
    assert "inference_1 ended (killed by SIGKILL (9)) and was started anew" in output
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if "canary/error" in row]
    assert max(row["canary/error"] for row in rows) < 1e-4
    assert audit(run) == []


@pytest.mark.slow
def test_two_embedded_engines_are_sent_changes_one_killed_and_back(warm: Path, tmp_path: Path) -> None:
    more = {
        "max_steps": 100000,
        "model": {"name": str(warm), "dtype": "bfloat16"},
        "trainer": {"optim": {"lr": 1e-5}},
        "inference": {"deployment": {"num_replicas": 2}, "router": None},
        "weight_broadcast": {"type": "collective", "join_timeout_s": 5.0, "delta": {}},
        "orchestrator": {"eval": None, "client": {"liveness_interval_s": 0.5}},
    }
    # An engine that is forked when it comes back would be back before it is missed.
    popen = start_rl(tmp_path, merged(RUN, more), num_forked=4)
    run = RunDir(tmp_path / "run")
    try:
        until(lambda: num_steps(run) >= 2, popen, "two steps")
        [victim] = [p for p in processes_of(popen.pid) if "inference_0.json" in " ".join(p.cmdline())]
        victim.kill()
        until(lambda: "is back after" in log(run, "orchestrator"), popen, "the engine to come back")
        at_return = num_steps(run)
        until(lambda: num_steps(run) >= at_return + 2, popen, "steps with both engines again")
        popen.send_signal(signal.SIGINT)
        code, output = wait(popen)
    finally:
        popen.kill()
    assert code == 0, output
    sent = [row["publish/bytes"] for row in read_metrics(run.metrics("trainer")) if "publish/bytes" in row]
    assert sorted(sent)[len(sent) // 2] < sent[0] / 4
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if "canary/error" in row]
    assert max(row["canary/error"] for row in rows) < 0.1
    assert min(row["canary/groups"] for row in rows) >= 3, "bits that came as changes"
    assert audit(run) == []


def num_steps(run: RunDir) -> int:
    path = run.metrics("trainer")
    return len({row["step"] for row in read_metrics(path) if "loss/mean" in row}) if path.exists() else 0


def log(run: RunDir, role: str) -> str:
    path = run.log(role)
    return path.read_text() if path.exists() else ""


def processes_of(pid: int) -> list[psutil.Process]:
    """Direct children of the launcher."""
    return psutil.Process(pid).children()


def engine_of(started: subprocess.Popen[str]) -> psutil.Process:
    """The engine of a `stretto engines start`."""
    [engine] = [child for child in processes_of(started.pid) if "inference" in child.cmdline()]
    return engine


@pytest.mark.slow
def test_engines_join_and_leave_a_run_and_no_rollout_is_lost(warm: Path, tmp_path: Path) -> None:
    more = {
        "max_steps": 100000,
        "model": {"name": str(warm)},
        "orchestrator": {"eval": None, "client": {"liveness_interval_s": 0.5}, "max_rollout_retries": 0},
    }
    popen = start_rl(tmp_path, merged(RUN, more))
    run = RunDir(tmp_path / "run")
    joined = []

    def ready() -> list[str]:
        return [url for url, node in fleet_of(run)["engines"].items() if node["state"] == "ready"]

    try:
        until(lambda: num_steps(run) >= 2, popen, "two steps")
        for _ in range(3):
            joined.append(start("engines", ["start", str(run), "--wait", "0"], tmp_path))
        until(lambda: len(ready()) == 4, popen, "three engines to join")
        urls = ready()
        before = num_steps(run)
        until(lambda: num_steps(run) >= before + 3, popen, "steps with four engines")
        asked, killed, orphan = (engine_of(each) for each in joined)
        asked.terminate()  # a scheduler may send it to the engine alone, or to both
        code, output = wait(joined[0])
        assert code == 0 and "leaving the run first" in output and "removed" in output, output
        os.killpg(killed.pid, signal.SIGKILL)
        code, output = wait(joined[1])
        assert code != 0, output
        joined[2].kill()
        wait(joined[2])
        assert psutil.wait_procs([orphan], 30)[1] == [], "it outlives `stretto engines start`"
        until(lambda: len(ready()) == 1, popen, "one engine to be left")
        wait(
            start(
                "engines",
                ["remove", str(run), *(url for url in fleet_of(run)["engines"] if url not in ready())],
                tmp_path,
            )
        )
        code, output = wait(start("engines", ["drain", str(run), *ready()], tmp_path))
        assert code == 1 and "is the only engine that is up" in output, output
        code, output = wait(start("engines", ["list", str(run)], tmp_path))
        assert code == 0 and output.split() == [ready()[0], "ready"]
        before = num_steps(run)
        until(lambda: num_steps(run) >= before + 3, popen, "steps with one engine")
        popen.send_signal(signal.SIGINT)
        code, output = wait(popen)
    finally:
        for each in (*joined, popen):
            each.kill()
    assert code == 0, output
    assert "was started anew" not in output and len(set(urls)) == 4
    assert audit(run) == []
    with LedgerReader(run) as ledger:
        ended = ledger.rollouts_by_status()
    assert set(ended) <= {"finished", "truncated", "dropped", "running", "lost"}, ended
