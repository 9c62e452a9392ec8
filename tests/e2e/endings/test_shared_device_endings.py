"""Ctrl-C, and the death of a process, in each use of shared devices ([colocate]): steps are kept, or it goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from runs import MOVING, has_moved, merged, rl, sorting, start_rl, until, untrained_model, wait
from test_kill import children, wait_for_child

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.orchestrator.versions.shared_devices import Use

STEPS = 8
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that every use takes some milliseconds."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4}
    return untrained_model(tmp_path_factory.mktemp("model"), **shape)


def settings(model: Path, **more: Any) -> dict[str, Any]:
    own = {"colocate": {}, "log": {"level": "debug"}, "ckpt": {"interval": 100}}
    own["orchestrator"] = {"filter_zero_advantages": False}
    return merged(sorting(model, STEPS), MOVING, own, more)


def until_use(run: RunDir, popen: Popen[str], use: Use, count: int) -> None:
    """Wait until this use has begun so many times."""
    log = run.log("orchestrator")

    def has_come() -> bool:
        return log.exists() and len(re.findall(f"devices: {use}$", log.read_text(), re.M)) >= count

    until(has_come, popen, f"the use {use}", every_s=0.001)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The last weights of a run that nobody stops."""
    ended = rl(tmp_path_factory.mktemp("undisturbed"), settings(model))
    assert has_moved(ended)
    return ended.weights(STEPS)


@pytest.mark.parametrize("use", [Use.LOADING, Use.ROLLOUTS, Use.TRAINING])
def test_a_run_that_is_stopped_in_any_use_saves_its_step_and_goes_on_bit_for_bit(
    use: Use, model: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    popen, run = start_rl(tmp_path, settings(model)), RunDir(tmp_path / "run")
    until_use(run, popen, use, 3)
    popen.send_signal(signal.SIGINT)
    code, output = wait(popen)
    assert code in (0, 130) and "Traceback" not in output and "assert" not in output, output
    saved = run.latest_complete_checkpoint()
    assert saved is not None and 1 <= saved < STEPS, output
    assert audit(run) == []
    assert rl(tmp_path, settings(model), "--resume").weights(STEPS) == undisturbed


def test_a_run_that_is_stopped_before_engines_have_weights_just_ends(model: Path, tmp_path: Path) -> None:
    popen, run = start_rl(tmp_path, settings(model)), RunDir(tmp_path / "run")
    wait_for_child(popen, "trainer")
    until(lambda: run.log("orchestrator").exists(), popen, "the orchestrator")
    popen.send_signal(signal.SIGINT)
    code, output = wait(popen)
    assert code in (0, 130) and "Traceback" not in output, output


@pytest.mark.parametrize("use", [Use.LOADING, Use.ROLLOUTS, Use.TRAINING])
def test_a_run_outlives_one_of_its_engines_whatever_the_use(use: Use, model: Path, tmp_path: Path) -> None:
    """It comes back and joins the use that it finds: asleep while the trainer trains."""
    own = {"inference": {"deployment": {"num_replicas": 2}, "kv_cache_tokens": 8192}}
    client = {"orchestrator": {"client": {"liveness_interval_s": 0.2}}}
    popen, run = start_rl(tmp_path, settings(model, **merged(own, client))), RunDir(tmp_path / "run")
    until_use(run, popen, use, 2)
    os.kill(children(popen.pid)["inference"], signal.SIGKILL)
    code, output = wait(popen)
    assert code == 0, output + run.log("orchestrator").read_text()
    assert "started anew" in output and run.weights_step(STEPS).is_dir()
    assert audit(run) == []


@pytest.mark.parametrize("use", [Use.LOADING, Use.ROLLOUTS, Use.TRAINING])
@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_a_run_that_loses_its_trainer_or_its_only_engine_ends_and_names_it(
    role: str, use: Use, model: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / f"loses_{role}_{use}")  # its files in memory have this name, and no other test's
    popen = start_rl(tmp_path, settings(model, run={"name": run.path.name}))
    until_use(run, popen, use, 2)
    os.kill(children(popen.pid)[role], signal.SIGKILL)
    code, output = wait(popen)
    assert code not in (0, 130) and re.search(f"{role}.*SIGKILL", output), output
    assert [name for name in os.listdir("/dev/shm") if run.path.name in name] == []
