"""Runs on a real Ray: placed, followed, stopped, resumed after a machine was lost.

Whatever happens, no rollout is trained twice, and nothing is left on the machines.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ENDLESS
from ray_cluster import Cluster, RayRun

from stretto.monitors.file import read_metrics

pytestmark = pytest.mark.cluster(modules=("ray",))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(num_machines=3)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., RayRun]]:
    started: list[RayRun] = []

    def start(max_steps: int, *words: str, verb: str = "rl", **ray: Any) -> RayRun:
        started.append(RayRun(cluster, tmp_path, max_steps, verb, **ray))
        started[-1].start(*words)
        return started[-1]

    yield start
    for each in started:
        each.close()


def check(run: RayRun, steps: int) -> None:
    run.check(steps)
    assert not any(run.processes(role) for role in ("orchestrator", "trainer", "inference"))


def test_a_run_trains_on_two_machines_and_is_looked_at(run: Callable[..., RayRun]) -> None:
    placed = run(4)
    placed.until(placed.steps, "the first step")
    assert "on Ray: on " in (shown := placed.stretto("status", str(placed.dir))), shown
    assert placed.end() == 0, placed.said()
    check(placed, 4)
    said = placed.said()
    assert "rl on 2 nodes of a Ray cluster" in said and "node 1  " in said and "step 4/4" in said
    assert "step 4" in placed.stretto("logs", str(placed.dir), "--lines", "200")
    assert "ended on Ray: exit status 0" in placed.stretto("status", str(placed.dir))
    secret = (placed.dir.path / "secret").read_text().strip()
    written = [path for path in placed.dir.path.rglob("*") if path.is_file() and path.name != "secret"]
    logs = [path for path in placed.cluster.directory.rglob("*.log")] + [
        path for path in placed.cluster.directory.rglob("*.out")
    ]
    assert logs and not [path for path in [*written, *logs] if secret.encode() in path.read_bytes()]


def test_sft_learns_on_two_machines(run: Callable[..., RayRun]) -> None:
    placed = run(30, "--optim.lr", "0.01", verb="sft")
    assert placed.end() == 0, placed.said()
    losses = [row["nll/mean"] for row in read_metrics(placed.dir.metrics("sft")) if "nll/mean" in row]
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.1
    assert not placed.processes("sft")


@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_a_run_that_loses_a_machine_resumes_on_another(run: Callable[..., RayRun], role: str) -> None:
    placed = run(ENDLESS)
    placed.until_saved(2)
    [process, *_] = placed.processes(role)
    placed.cluster.kill(process)
    placed.cluster.add()
    placed.until(lambda: "The run resumes from step" in placed.said(), "the machine is missed")
    saved = placed.saved()
    placed.until_saved(saved + 2)
    assert "/ray/rl.json" not in placed.said(), "what is said to be typed is what the user typed"
    assert "restart 1, 9 more allowed" in placed.said() and f"resumed from step {saved}" in placed.said()
    assert "started again 1 times" in placed.stretto("status", str(placed.dir))
    assert "finishes its step" in placed.stretto("stop", str(placed.dir))
    assert placed.end() == 0, placed.said()
    check(placed, placed.saved())


def test_a_lost_machine_ends_a_run_that_may_not_be_started_again(run: Callable[..., RayRun]) -> None:
    placed = run(ENDLESS, max_restarts=0)
    placed.until(placed.steps, "the first step")
    placed.cluster.kill(placed.processes("inference")[0])
    placed.cluster.add()
    assert placed.end() == 1
    assert "is lost" in placed.said() and "not started again: ray.max_restarts = 0" in placed.said()
    check(placed, placed.steps()[-1])


def test_an_actor_that_fails_is_named_with_its_node(run: Callable[..., RayRun]) -> None:
    placed = run(ENDLESS)
    placed.until(placed.steps, "the first step")
    (placed.dir.ray / "node_1.log").unlink()
    assert placed.end() == 1
    last = placed.said().splitlines()[-1]
    assert re.fullmatch(r"error: \[ray\]: the actor of node 1 \([\d.]+\) failed: FileNotFoundError: .*", last), last
    assert not any(placed.processes(role) for role in ("orchestrator", "trainer", "inference"))


def test_ctrl_c_finishes_the_step_and_the_run_is_resumed_by_hand(run: Callable[..., RayRun]) -> None:
    placed = run(ENDLESS)
    placed.until_saved(2)
    placed.popen.send_signal(signal.SIGINT)
    assert placed.end() == 0, placed.said()
    saved = placed.saved()
    check(placed, saved)
    placed.start("--resume", "--max-steps", str(saved + 2))
    assert placed.end() == 0, placed.said()
    check(placed, saved + 2)


def test_a_cluster_that_does_not_answer_is_one_message(run: Callable[..., RayRun]) -> None:
    placed = run(4, address="127.0.0.1:1")
    assert placed.end() == 2
    assert placed.said().startswith("error: [ray]: no Ray cluster answers at 127.0.0.1:1 (ray.address): ")
    assert len(placed.said().splitlines()) == 1 and not placed.dir.path.exists()


def test_what_is_missing_is_said_until_the_deadline(run: Callable[..., RayRun]) -> None:
    placed = run(4, wait_s=4, cpus_per_node=64)
    assert placed.end() == 2
    last = placed.said().splitlines()[-1]
    assert last.startswith(
        "error: [ray]: after 4 s 2 of 2 nodes of the plan have no machine (CPU 64 each, STRICT_SPREAD)"
    )
    assert "CPU 128 asked, 6 there, 6 free" in last and " has CPU 2 of 2 free" in last
    assert "waiting up to 4 s for machines: " in placed.said()


def test_a_run_on_a_cluster_that_waits_can_be_stopped_and_holds_its_directory(run: Callable[..., RayRun]) -> None:
    placed = run(4, resources={"h200": 1})
    placed.until(lambda: "h200 2 asked, 0 there" in placed.said(), "the message")
    assert "waiting on Ray: 2 of 2 nodes" in placed.stretto("status", str(placed.dir))
    first = placed.popen
    placed.start()
    assert placed.popen.wait(60) == 2 and "is on a Ray cluster already" in placed.said()
    placed.popen = first
    placed.stretto("stop", str(placed.dir), "--now")
    assert placed.end() == 130
    assert json.loads((placed.dir.ray / "state.json").read_text())["state"] == "ended"


def test_a_command_that_is_killed_leaves_nothing_on_the_machines(run: Callable[..., RayRun]) -> None:
    placed = run(ENDLESS)
    placed.until(placed.steps, "the first step")
    others = placed.processes("inference") + placed.processes("trainer")
    placed.popen.kill()
    placed.popen.wait()
    ended = RayRun.__new__(RayRun)
    ended.__dict__ = placed.__dict__ | {"popen": _Nobody()}
    ended.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others), "the end of the processes")
    assert "which waited for it, is gone; it was running" in placed.stretto("status", str(placed.dir))


class _Nobody:
    def poll(self) -> None:
        return None


def test_ray_itself_knows_no_variable_of_the_run(run: Callable[..., RayRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", token := "a-token-that-was-made-up")
    placed = run(1, pass_env=["MY_TOKEN"], env={"MY_MODE": "quick"})
    placed.until(lambda: placed.processes("trainer"), "the trainer")
    environ = Path(f"/proc/{placed.processes('trainer')[0]}/environ").read_bytes().split(b"\0")
    assert f"MY_TOKEN={token}".encode() in environ and b"MY_MODE=quick" in environ
    assert placed.end() == 0, placed.said()
    files = [*placed.cluster.directory.rglob("*"), *placed.dir.path.rglob("*")]
    found = [str(path) for path in files if path.is_file() and token.encode() in path.read_bytes()]
    assert not found and os.environ["MY_TOKEN"] == token
