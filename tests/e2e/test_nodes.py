"""A run over several machines, here several addresses of one: each starts the same command and runs its own part."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from runs import over_addresses, start_rl, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics


def test_nodes_train_together_and_each_starts_what_is_its_own(sorter: Path, tmp_path: Path) -> None:
    settings = over_addresses(sorter, num_hosts=4, max_steps=4)
    nodes = [start_rl(tmp_path, settings, "--deployment.node-rank", str(rank)) for rank in range(4)]
    try:
        code, output = wait(nodes[0])
        assert code == 0, output + "".join(end(node) for node in nodes[1:])
        code, output = wait(nodes[1])  # the trainer's other rank ends with the run
        assert code == 0, output
        outputs = [end(node) for node in nodes[2:]]  # engines serve on until they are told
        assert all(node.returncode == 0 for node in nodes[2:]), outputs
    finally:
        for node in nodes:
            node.kill()
    run = RunDir(tmp_path / "run")
    rows = read_metrics(run.metrics("orchestrator"))
    assert max(row["canary/error"] for row in rows if "canary/error" in row) < 1e-4
    assert max(row["step"] for row in rows) == 4
    assert audit(run) == []
    for rank, name in ((1, "trainer_1"), (2, "inference_0"), (3, "inference_1")):
        assert RunDir(tmp_path / f"run-node-{rank}").log(name).exists()


@pytest.mark.slow
def test_trainer_and_engines_of_several_machines_take_turns(sorter: Path, tmp_path: Path) -> None:
    """Two machines, each with a rank and an engine, learn what four do on which nobody sleeps."""
    weights = {}
    for name, num_hosts, more in (("turns", 2, {"colocate": {}}), ("apart", 4, {})):
        settings = over_addresses(sorter, num_hosts=4, max_steps=3)
        settings["deployment"]["hosts"] = settings["deployment"]["hosts"][:num_hosts]
        settings["orchestrator"]["max_async_level"] = 0
        settings["weight_broadcast"] = {"type": "filesystem"}
        (tmp_path / name).mkdir()
        words = ["--deployment.node-rank"]
        nodes = [start_rl(tmp_path / name, settings | more, *words, str(rank)) for rank in range(num_hosts)]
        try:
            code, output = wait(nodes[0])
            assert code == 0, output + "".join(end(node) for node in nodes[1:])
            code, output = wait(nodes[1])
            assert code == 0, output
        finally:
            for node in nodes[2:]:
                end(node)
            for node in nodes:
                node.kill()
        run = RunDir(tmp_path / name / "run")
        assert audit(run) == []
        files = sorted(run.weights_step(3).glob("*.safetensors"))  # one per rank
        weights[name] = [path.read_bytes() for path in files]
    for engine in (tmp_path / "turns").glob("run*/logs/inference_*.log"):
        assert engine.read_text().count("asleep at level 2") == 4, engine
    assert weights["turns"] and weights["turns"] == weights["apart"]


def end(node: subprocess.Popen[str]) -> str:
    node.send_signal(signal.SIGTERM)
    return wait(node)[1]
