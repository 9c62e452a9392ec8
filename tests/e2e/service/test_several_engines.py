"""A service with two trainer ranks and two engines behind a router; its runs come from a watched directory."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports, free_ports_in_a_row
from runs import Ended, start, toml, wait
from services import serving

from stretto.base.paths import RunDir
from stretto.base.ports import open_url
from stretto.base.secret import load_secret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed"),
]
WAIT_S = 240.0


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {WAIT_S:g} s"
        time.sleep(0.2)


def state(control: Path) -> str | None:
    path = control / "status.json"
    return json.loads(path.read_text())["state"] if path.exists() else None


def num_sampled(port: int, run: RunDir) -> float:
    """Tokens that an engine of a run has sampled."""
    key = load_secret(run).text_key("inference.api_key")
    url = f"http://127.0.0.1:{port}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        open_url(url, 30)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    return sum(float(words[-1]) for words in lines if words and "generation_tokens_total" in words[0])


def settings(model: Path, rank: int = 8) -> dict[str, Any]:
    control, rollouts = free_ports(2)
    return {
        "max_steps": 3,
        "seq_len": 128,
        "view": False,
        "model": {"name": str(model), "lora": {"rank": rank}},
        "control": {"port": control},
        "rollout_transport": {"port": rollouts},
        "trainer": {"optim": {"lr": 1e-3}},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }


@pytest.mark.parametrize("cp", [1, 2])
def test_runs_of_a_directory_train_on_two_ranks_and_sample_from_two_engines(
    sorter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cp: int
) -> None:
    model, backends = sorter.resolve(), free_ports_in_a_row(2)
    runs = tmp_path / "runs"

    def write(name: str, **how: int) -> Path:
        control = runs / name / "control"
        control.mkdir(parents=True)
        (control / "orch.toml").write_text(toml(settings(model, **how)))
        return control

    right, wrong, idle = write("run_letters"), write("run_wrong", rank=99), write("run_idle")
    root = {
        "trainer": {"num_ranks": 2},
        "model": {"cp": cp},
        "inference": {"router": {"policy": "round_robin"}, "deployment": {"num_replicas": 2, "backend_port": backends}},
    }
    with serving(tmp_path / "own", model, root=root, runs_dir=str(runs), runs_user="alice") as service:
        until(lambda: (state(right), state(idle)) == ("active", "active"), "registered runs")
        assert "rank = 99 must be 1 to 32" in (wrong / "config_validation_error.txt").read_text()
        assert state(wrong) is None

        (idle / "evicted.txt").write_text("not needed\n")
        until(lambda: state(idle) == "evicted", "eviction")
        assert service.call("POST", "/v1/runs/alice:run_idle/step?seq=1", {}, user="alice")[0] == 423
        (idle / "evicted.txt").unlink()
        until(lambda: not json.loads((idle / "status.json").read_text())["reason"], "resumption")

        monkeypatch.setenv("ALICE_TOKEN", service.token("alice"))
        words = ["@", str(right / "orch.toml"), "--service", service.url, "--service.token-var", "ALICE_TOKEN"]
        words += ["--run.name", "run_letters", "--output-dir", str(tmp_path / "outputs")]
        code, output = wait(start("rl", words, tmp_path, is_forked=False))
        assert code == 0, output
        run = Ended(code, output, RunDir(tmp_path / "outputs/run_letters"))
        losses = run.column("loss/mean", "trainer")
        assert len(losses) == 3 and all(map(math.isfinite, losses))
        until(lambda: state(right) == "ended", "the end of the run")
        assert json.loads((right / "status.json").read_text())["step"] == 3
        assert all(num_sampled(port, RunDir(service.run)) > 0 for port in (backends, backends + 1)), (
            "both engines sampled"
        )
        ranks = sorted(path.name for path in (service.run / "logs").glob("*tenants*"))
        assert len(ranks) == 2, ranks
        assert service.call("GET", "/v1/status")[1]["engines"]["ready"] == 2
