"""Runs on environments of hubs, with the packages of the hubs themselves.

They are in virtual environments of their own (processes/hubs.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes.hubs import python_of
from runs import Ended, merged, rl
from test_ranks import build_model
from test_worker_runs import SETTINGS

from stretto.base.errors import ConfigError
from stretto.envs.checks import look_into, missing_for

pytestmark = pytest.mark.slow
NO_MISMATCH = 1e-6
EXAMPLE = Path(__file__).parents[3] / "examples" / "harbor"


def check_steps(ended: Ended, num_steps: int) -> None:
    """Every step trained tokens that the engine sampled: the trainer finds their log-probabilities."""
    assert len(ended.column("reward/mean")) == num_steps, ended.output
    assert all(0 <= value < NO_MISMATCH for value in ended.column("mismatch_kl/max")), ended.column("mismatch_kl/max")


def run_of(directory: Path, env: dict, *, num_steps: int = 3, **more: object) -> Ended:
    settings = merged(SETTINGS, {"max_steps": num_steps, "orchestrator": {"env": [env]}}, more)
    return rl(directory, settings | {"model": {"name": build_model(directory)}})


def test_an_environment_of_openenv_is_trained_with_its_own_server(tmp_path: Path) -> None:
    python = python_of("openenv")
    environment = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    command = [str(Path(python).parent / "openenv"), "init", "parrot_env"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    env = {"id": "openenv:parrot_env", "name": "parrot", "args": {"python": python, "max_turns": 2}}
    ended = run_of(tmp_path, env)
    check_steps(ended, 3)
    assert max(ended.column("reward/mean")) > 0, "a word's length is its reward"
    assert not list(tmp_path.glob("run/**/stretto-hub-*"))


def test_servers_of_nemo_gym_are_trained(tmp_path: Path) -> None:
    python = python_of("nemo-gym")
    find = "import resources_servers.blackjack as b; print(list(b.__path__)[0])"
    place = subprocess.run(
        [python, "-c", find], env=os.environ | {"PYTHONPATH": ""}, check=True, capture_output=True, text=True
    )
    rows = Path(place.stdout.strip(), "data", "example.jsonl")
    env = {"id": "nemo-gym:blackjack", "name": "blackjack", "args": {"python": python, "path": str(rows)}}
    ended = run_of(tmp_path, env, seq_len=512)
    check_steps(ended, 3)
    assert all(-1 <= value <= 1 for value in ended.column("reward/mean"))


def test_a_suite_of_harbor_is_trained_without_containers(tmp_path: Path) -> None:
    python = python_of("harbor")
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    args = {"python": python, "agent": "one_reply:OneReply", "environment": "local", "output_dir": "trials"}
    ended = run_of(tmp_path, {"id": "harbor:suite", "name": "suite", "args": args}, num_steps=2)
    check_steps(ended, 2)
    trials = list((tmp_path / "trials").glob("*/result.json"))
    assert len(trials) >= 32, "each rollout is a trial"
    assert not list((tmp_path / "trials").glob("*/root")), "what trials have written is removed"


def test_what_a_suite_needs_and_does_not_find_is_said_before_a_run(tmp_path: Path) -> None:
    python = python_of("harbor")
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    dockerfile = next(tmp_path.glob("suite/*/environment/Dockerfile"))
    dockerfile.write_text("FROM ubuntu:24.04\nRUN apt-get install -y gcc\n")
    suite = f"harbor:{tmp_path / 'suite'}"
    local, wrong = missing_for(suite, {"python": python, "agent": "orackle", "environment": "local"})
    assert "Agent name orackle is not valid" in local
    assert "its Dockerfile has `RUN apt-get install -y gcc`, which needs docker" in wrong
    dockerfile.parent.parent.rename(tmp_path / "suite" / "compiles")
    asked = {"python": python, "agent": "oracle", "environment": "local", "tasks": ["sort-*"]}
    assert look_into(suite, asked, "suite")[0].startswith("tasks 2;") and missing_for(suite, asked) == []
    [settings] = missing_for(
        suite, {"python": python, "agent": "oracle", "environment": "docker", "environment_args": {"no_such": 1}}
    )
    assert "Unknown option 'no_such'" in settings
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        [docker] = missing_for(suite, {"python": python, "agent": "oracle"})
        assert docker.startswith("environment: Docker")
    (tmp_path / "empty").mkdir()
    for name, said in (("empty", "there are no tasks"), ("no/such/place", "there is no directory")):
        with pytest.raises(ConfigError, match=said):
            missing_for(f"harbor:{tmp_path / name}", {"python": python})


@pytest.mark.parametrize("harness", ["in_process", "null"])
def test_harnesses_of_verifiers_are_named_in_the_arguments(tmp_path: Path, harness: str) -> None:
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("the extra verifiers is not installed")
    if harness == "null" and shutil.which("uv") is None:
        pytest.skip("this harness needs the program uv")
    ended = run_of(tmp_path, {"id": "verifiers:vowels-v1", "name": "vowels", "args": {"harness": harness}}, num_steps=2)
    check_steps(ended, 2)
