"""Whole runs behind other routers: a vllm-router that runs already and that engines enter, and Dynamo's frontend."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from ports import free_port
from runs import merged, rl, start_rl, until, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics
from stretto_routers.kinds import MADE

pytestmark = pytest.mark.slow
RUN = {
    "max_steps": 6,
    "orchestrator": {
        "batch_size": 32,
        "group_size": 4,
        "max_async_level": 0,
        "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        "train": {"sampling": {"max_completion_tokens": 8}},
        "eval": None,
        "client": {"liveness_interval_s": 0.5},
    },
    "trainer": {"optim": {"lr": 1e-4}},
    "inference": {"deployment": {"num_replicas": 2}},
}


def listed(router: str) -> list[str]:
    with contextlib.suppress(OSError), urllib.request.urlopen(router + "/list_workers", timeout=10) as answer:
        return json.load(answer)["urls"]
    return []


def num_steps(run: RunDir) -> int:
    path = run.metrics("trainer")
    return len({row["step"] for row in read_metrics(path) if "loss/mean" in row}) if path.exists() else 0


def assert_exact(run: RunDir) -> None:
    """Every version was loaded, tokens are trained with the log-probabilities that they were sampled with."""
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if "canary/error" in row]
    assert rows and max(row["canary/error"] for row in rows) < 1e-4
    assert audit(run) == []


@pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed")
def test_a_killed_engine_leaves_a_router_that_runs_elsewhere_and_returns(sorter: Path, tmp_path: Path) -> None:
    port = free_port()
    router = f"http://127.0.0.1:{port}"
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [sys.executable, "-m", "vllm_router.launch_router", *words, "--policy", "consistent_hash"]
    more = {"max_steps": 100000, "model": {"name": str(sorter)}, "inference": {"router": {"address": router}}}
    with (tmp_path / "router.log").open("wb") as log:
        elsewhere = subprocess.Popen(command, stdout=log, stderr=log)
    run = RunDir(tmp_path / "run")
    try:
        until(lambda: _answers(router), elsewhere, "the router to answer")
        # A forked engine would be back before it is missed.
        popen = start_rl(tmp_path, merged(RUN, more), is_forked=False)
        try:
            until(lambda: num_steps(run) >= 2 and len(listed(router)) == 2, popen, "two steps with two engines")
            children = psutil.Process(popen.pid).children()
            [victim] = [child for child in children if "inference_0.json" in " ".join(child.cmdline())]
            victim.kill()
            until(lambda: len(listed(router)) == 1, popen, "the engine to leave the router")
            until(lambda: len(listed(router)) == 2, popen, "the engine to enter it again")
            at_return = num_steps(run)
            until(lambda: num_steps(run) >= at_return + 2, popen, "steps with both engines again")
            popen.send_signal(signal.SIGINT)
            code, output = wait(popen)
        finally:
            popen.kill()
        assert code == 0, output
        assert listed(router) == []
    finally:
        elsewhere.terminate()
        elsewhere.wait(60)
    assert "is back after" in run.log("orchestrator").read_text()
    assert_exact(run)


def _answers(router: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(router + "/list_workers", timeout=10):
        return True
    return False


@pytest.mark.skipif(not (Path(sys.prefix) / MADE).exists(), reason="Dynamo is not installed: `make dynamo`")
@pytest.mark.parametrize("policy", ["kv", "session_affinity"])
def test_a_run_behind_dynamo_trains_on_exact_tokens(policy: str, sorter: Path, tmp_path: Path) -> None:
    more = {"model": {"name": str(sorter)}, "inference": {"router": {"type": "dynamo", "policy": policy}}}
    done = rl(tmp_path, merged(RUN, more))
    assert num_steps(done.run) == 6
    assert_exact(done.run)
    assert max(done.column("mismatch_kl/mean", "trainer")) < 1e-5
