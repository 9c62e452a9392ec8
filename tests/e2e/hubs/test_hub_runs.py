"""Runs on environments of hubs, with the packages of the hubs themselves.

STRETTO_HUBS is a directory with a virtual environment for each: `openenv`, `harbor`, `nemo-gym` (docs/contributing.md).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Ended, merged, rl
from test_ranks import build_model
from test_worker_runs import SETTINGS

pytestmark = pytest.mark.slow
MODULES = {"openenv": "openenv", "harbor": "harbor", "nemo-gym": "nemo_gym"}
NO_MISMATCH = 1e-6


def python_of(hub: str) -> str:
    """The Python that has the package of a hub; the test is skipped if there is none."""
    python = Path(os.environ.get("STRETTO_HUBS", "")) / hub / "bin" / "python"
    if "STRETTO_HUBS" in os.environ and python.exists():
        return str(python)
    if importlib.util.find_spec(MODULES[hub]) is None:
        pytest.skip(f"there is no package {hub}")
    return sys.executable


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
    for letter in "aei":
        write_task(tmp_path / "suite" / f"write-{letter}", letter)
    shutil.copy(Path(__file__).with_name("harbor_agent.py"), tmp_path)
    args = {"python": python, "agent": "harbor_agent:OneReply", "environment": "local"}
    ended = run_of(tmp_path, {"id": "harbor:suite", "name": "suite", "args": args}, num_steps=2)
    check_steps(ended, 2)
    assert max(ended.column("reward/mean")) > 0


@pytest.mark.parametrize("harness", ["in_process", "null"])
def test_harnesses_of_verifiers_are_named_in_the_arguments(tmp_path: Path, harness: str) -> None:
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("the extra verifiers is not installed")
    if harness == "null" and shutil.which("uv") is None:
        pytest.skip("this harness needs the program uv")
    ended = run_of(tmp_path, {"id": "verifiers:vowels-v1", "name": "vowels", "args": {"harness": harness}}, num_steps=2)
    check_steps(ended, 2)


def write_task(directory: Path, letter: str) -> None:
    """A task of Harbor, whose reward is the share of a letter in what the agent has written."""
    for name in ("environment", "tests"):
        (directory / name).mkdir(parents=True)
    (directory / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 60.0\n')
    (directory / "instruction.md").write_text(letter)
    (directory / "environment" / "Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\nCOPY letter given\n")
    (directory / "environment" / "letter").write_text(letter)
    (directory / "tests" / "test.sh").write_text(
        "#!/bin/bash\n"
        'found=$(tr -cd "$(cat /app/given)" < /app/out | wc -c)\n'
        "all=$(wc -c < /app/out)\n"
        'awk "BEGIN { print $found / ($all + 1) }" > /logs/verifier/reward.txt\n'
    )
