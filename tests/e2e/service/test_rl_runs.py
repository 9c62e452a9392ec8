"""`rl --service`: runs whose trainer and engines are those of a service, two at a time, one killed and resumed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from runs import Ended, merged, start_rl, until, wait
from services import Service, serving

from stretto.base.paths import RunDir

Settings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def service(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("rl-runs"), sorter.resolve(), max_lora_rank=16) as running:
        yield running


@pytest.fixture
def settings(service: Service, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a small run of a user, whose token is in the environment."""

    def build(env: dict[str, Any], user: str = "alice", **own: Any) -> dict[str, Any]:
        monkeypatch.setenv(f"{user.upper()}_TOKEN", service.token(user))
        control, rollouts = free_ports(2)
        base = {
            "max_steps": 4,
            "seq_len": 128,
            "view": False,
            "model": {"name": service.model, "lora": {"rank": 8}},
            "service": {"url": service.url, "token_var": f"{user.upper()}_TOKEN"},
            "control": {"port": control},
            "rollout_transport": {"port": rollouts},
            "ckpt": {"interval": 2},
            "trainer": {"optim": {"lr": 1e-3}},
            "orchestrator": {
                "batch_size": 32,
                "group_size": 4,
                "train": {"sampling": {"max_completion_tokens": 6}},
                "env": [env],
            },
        }
        return merged(base, own)

    return build


def started(directory: Path, settings: dict[str, Any], *words: str) -> subprocess.Popen[str]:
    directory.mkdir(exist_ok=True)
    return start_rl(directory, settings, *words)


def ended(popen: subprocess.Popen[str], directory: Path) -> Ended:
    code, output = wait(popen)
    return Ended(code, output, RunDir(directory / "run"))


def check_steps(run: Ended, last: int) -> None:
    """The run has all steps with rewards, finite losses and bounded staleness, and its last checkpoint."""
    assert run.code == 0, run.output
    rows = {step: row for step, row in run.steps("trainer").items() if "loss/mean" in row}
    assert list(rows) == list(range(1, last + 1))
    for row in rows.values():
        assert math.isfinite(row["loss/mean"]) and row["optim/grad_norm"] > 0
    assert max(run.column("reward/mean")) > 0
    assert run.run.latest_complete_checkpoint() == last
    with run.ledger() as ledger:
        versions = ledger.rows("select distinct version from rollouts where version is not null")
    assert len(versions) > 1, "engines sampled from several versions"


LETTERS = {"id": "sort-letters", "args": {"num_letters": 4}}


@pytest.mark.slow
def test_two_runs_at_once_and_one_that_is_killed_goes_on(service: Service, settings: Settings, tmp_path: Path) -> None:
    sorts = settings(LETTERS)
    reverses = settings({"id": "reverse-text"}, "bob", run={"name": "run"})
    first = started(tmp_path / "letters", sorts)
    second = started(tmp_path / "text", reverses, "--max-steps", "500")
    until(RunDir(tmp_path / "text/run").complete_marker(2).exists, second, "a checkpoint of step 2")
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    check_steps(ended(first, tmp_path / "letters"), 4)
    assert service.call("GET", "/v1/runs/alice:run", user="alice")[1]["state"] == "ended"
    assert service.call("GET", "/v1/runs/bob:run", user="bob")[1]["state"] == "active"

    kept = RunDir(tmp_path / "text/run").latest_complete_checkpoint()
    assert kept is not None
    resumed = ended(started(tmp_path / "text", reverses, "--resume", "--max-steps", str(kept + 2)), tmp_path / "text")
    assert resumed.code == 0, resumed.output
    assert resumed.run.latest_complete_checkpoint() == kept + 2
    place = json.loads((resumed.run.checkpoint(kept + 2) / "trainer/service.json").read_text())
    assert place == place | {"run": "bob:run", "path": f"tinker://bob:run/weights/step_{kept + 2}"}
    for config in (tmp_path / "text/run").rglob("*.json"):
        assert service.token("bob") not in config.read_text(), "no token in a file"


@pytest.mark.parametrize(
    ("words", "say"),
    [
        (["--model.lora.rank", "17"], "rank = 17 must be 1 to 16 (service.max_lora_rank) (HTTP 400)"),
        (["--seq-len", "4096"], "seq_len = 4096 must be at most 128, that of this service (HTTP 400)"),
        (["--service.token-var", "WRONG_TOKEN"], "this token is not known here"),
        (["--service.token-var", "NO_TOKEN"], "the environment variable NO_TOKEN is not set"),
        (["--model.name", "OTHER"], "is not served here; this service has"),
    ],
)
def test_what_the_service_does_not_take_is_one_message_before_anything_starts(
    settings: Settings, sorter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], say: str
) -> None:
    monkeypatch.setenv("WRONG_TOKEN", "tml-somebody-else")
    other = tmp_path / "other"
    other.symlink_to(sorter.resolve())
    words = [str(other) if word == "OTHER" else word for word in words]
    for dry in ([], ["--dry-run"]):
        run = ended(started(tmp_path, settings(LETTERS), *words, *dry), tmp_path)
        assert run.code == 2 and run.output.count("error:") == 1 and say in run.output, run.output
        assert not run.run.path.exists()


def test_a_name_that_is_taken_is_said(service: Service, settings: Settings, tmp_path: Path) -> None:
    spec = {"spec": {"name": "run", "rank": 4}, "base_model": service.model}
    assert service.call("POST", "/v1/runs", spec, user="alice")[0] == 201
    taken = ended(started(tmp_path, settings(LETTERS)), tmp_path)
    assert taken.code == 2 and "you have a run 'run' already" in taken.output, taken.output
    assert "(HTTP 409)" in taken.output
    assert service.call("POST", "/runs/run/end", {}, user="bob")[1] == {"ended": False}
    assert service.call("POST", "/runs/run/end", {}, user="alice")[1] == {"ended": True}
