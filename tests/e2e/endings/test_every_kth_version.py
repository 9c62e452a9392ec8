"""`weight_broadcast.interval`: engines get every k-th version, also of runs that are killed or stopped between two."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from processes.add_ons import needs
from runs import Ended, rl, start, start_rl, until, untrained_model, wait
from test_clock import delayed, play, weights

from stretto.ledger.audit import audit

INTERVAL, NUM_STEPS = 3, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("model"))


def every_third(model: Path, **more: Any) -> dict[str, Any]:
    settings = delayed(model, INTERVAL - 1, weight_broadcast={"interval": INTERVAL, "canary_interval": 1})
    return settings | {"deterministic": False, "ckpt": {"interval": 1, "weights": {"interval": 1}}} | more


def sampled_versions(run: Ended) -> set[int]:
    """Those of the trained tokens."""
    with run.ledger() as ledger:
        rows = ledger.rows("SELECT DISTINCT first_version, last_version FROM live_rollouts WHERE step IS NOT NULL")
    return {version for row in rows for version in (row["first_version"], row["last_version"])}


def loaded_versions(run: Ended) -> list[int]:
    with run.ledger() as ledger:
        rows = ledger.rows("SELECT DISTINCT version FROM versions WHERE state = 'loaded' ORDER BY version")
    return [row["version"] for row in rows]


@pytest.mark.heavy
def test_engines_get_every_third_version_and_the_last(model: Path, tmp_path: Path) -> None:
    run = rl(tmp_path, every_third(model))
    assert loaded_versions(run) == [0, 3, 6, 8]
    assert sampled_versions(run) <= {0, 3, 6}
    assert len(set(weights(run))) == NUM_STEPS, "every step has moved the weights"
    assert max(run.column("off_policy/max")) <= INTERVAL - 1, "tokens are no older than max_async_level allows"
    assert len([row for row in run.steps("trainer").values() if "publish/bytes" in row]) == 3, "others are not sent"
    assert run.column("canary/error")[-1] < 1e-3
    assert audit(run.run, payloads=True) == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("how", "step"),
    [("kill", 4), *(pytest.param("kill", step, marks=pytest.mark.slow) for step in (3, 5))]
    + [pytest.param("stop", step, marks=pytest.mark.slow) for step in (3, 4, 5)],
)
def test_a_run_goes_on_from_each_phase_of_the_interval(model: Path, tmp_path: Path, how: str, step: int) -> None:
    settings = every_third(model)
    popen = start_rl(tmp_path, settings, is_forked=False)
    done = tmp_path / "run" / "checkpoints" / f"step_{step}" / "COMPLETE"
    until(done.exists, popen, f"the checkpoint of step {step}")
    popen.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
    wait(popen)
    resumed = rl(tmp_path, settings, "--resume")
    found = re.search(r"resumed from step (\d+)", resumed.output)
    assert found, resumed.output
    start = int(found[1])
    assert start >= step
    assert loaded_versions(resumed)[-1] == NUM_STEPS
    assert {version for version in sampled_versions(resumed) if version % INTERVAL} <= {start}
    assert resumed.run.weights_step(NUM_STEPS).exists()
    assert audit(resumed.run, payloads=True) == []


@pytest.mark.heavy
@pytest.mark.slow
def test_by_the_clock_a_kill_between_two_versions_changes_no_bit(model: Path, tmp_path: Path) -> None:
    settings = every_third(model, deterministic=True, ckpt={"interval": INTERVAL, "weights": {"interval": 1}})
    straight = play(tmp_path / "straight", settings)
    directory = tmp_path / "killed"
    directory.mkdir()
    killed = start_rl(directory, settings, is_forked=False)
    until(lambda: (directory / "run" / "weights" / "step_5").exists(), killed, "weights of step 5")
    killed.kill()
    wait(killed)
    resumed = play(directory, settings, "--resume")
    assert weights(resumed) == weights(straight)
    assert sampled_versions(resumed) == sampled_versions(straight) == {0, 3, 6}
    assert audit(resumed.run, payloads=True) == []


def steered(model: Path) -> dict[str, Any]:
    """Settings of a run that has fewer versions as soon as they save any time."""
    settings = every_third(model, max_steps=20, weight_broadcast={"canary_interval": 1})
    steering = {"max_update_interval": 3, "interval": 2, "min_gain": 1e-9, "min_wait": 0.99, "max_level": 4}
    return settings | {"orchestrator": settings["orchestrator"] | {"max_async_level": 1, "steering": steering}}


def decided_intervals(run: Ended) -> list[int]:
    with run.ledger() as ledger:
        return [event["data"]["update_interval"] for event in ledger.events("steering")]


@pytest.mark.heavy
@needs("steering")
def test_steering_lets_engines_have_fewer_versions_and_a_replay_trains_the_same(model: Path, tmp_path: Path) -> None:
    run = rl(tmp_path, steered(model))
    versions, found = loaded_versions(run), decided_intervals(run)
    assert max(found) > 1 and 8 < len(versions) < 21 and versions[-1] == 20
    assert sampled_versions(run) <= {*versions}
    published = [row for row in run.steps("trainer").values() if "publish/bytes" in row]
    assert len(published) == len(versions) - 1, "others are not sent, and the first was before the first step"
    assert all(row["steering/update_interval"] in (1, *found) for row in run.steps("orchestrator").values())
    assert audit(run.run, payloads=True) == []
    code, output = wait(start("replay", [str(run.run.path), "--steps", "4"], tmp_path))
    assert code == 0, output


@pytest.mark.slow
@needs("steering")
def test_a_steered_run_that_is_killed_goes_on_with_its_interval(model: Path, tmp_path: Path) -> None:
    settings = steered(model)
    popen = start_rl(tmp_path, settings, is_forked=False)
    until((tmp_path / "run" / "checkpoints" / "step_14" / "COMPLETE").exists, popen, "the checkpoint of step 14")
    popen.send_signal(signal.SIGKILL)
    wait(popen)
    resumed = rl(tmp_path, settings, "--resume")
    assert loaded_versions(resumed)[-1] == 20 and max(decided_intervals(resumed)) > 1
    assert audit(resumed.run, payloads=True) == []
