"""A real run, killed again and again: the rest stops, `--resume` goes on, no rollout is trained twice.

STRETTO_KILLS sets how many times (3 by default, once per role; 20 for a thorough run).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import forked
from runs import DEADLINE_S, untrained_model
from waiting import is_running

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

NUM_KILLS = int(os.environ.get("STRETTO_KILLS", "3"))
ROLES = ("inference", "orchestrator", "trainer")
TOML = """
max_steps = {max_steps}
seq_len = 64
output_dir = "{directory}"
[run]
name = "killed"
[model]
name = "{model}"
[ckpt]
interval = 2
keep_last = 2
[orchestrator]
batch_size = 16
group_size = 4
filter_zero_advantages = false
[trainer.loss]
entropy_coef = 0.01
[orchestrator.train.sampling]
max_completion_tokens = 8
[[orchestrator.env]]
id = "sort-letters"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random network of a few thousand parameters, with the letters tokenizer."""
    return untrained_model(tmp_path_factory.mktemp("model"))


class Job:
    """One run directory and the commands on it; nothing of it outlives the test."""

    def __init__(self, directory: Path, model: Path, max_steps: int) -> None:
        self.run = RunDir(directory / "killed")
        self._popen: subprocess.Popen[str] | None = None
        self._toml = directory / "rl.toml"
        self._toml.write_text(TOML.format(directory=directory, model=model, max_steps=max_steps))

    def start(self, *words: str, is_forked: bool = True) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stretto", "rl", "@", str(self._toml), *words]
        kind = forked.Popen if is_forked else subprocess.Popen
        self._popen = kind(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return self._popen

    def close(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.communicate()

    def way_on(self) -> list[str]:
        """What a person types after a failure: on from a checkpoint where there is one."""
        return ["--resume"] if self.run.latest_complete_checkpoint() else ["--clean"]


def children(launcher: int) -> dict[str, int]:
    """Role -> pid of the processes that a launcher has started so far."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:  # it has ended meanwhile
            continue
        role = words[3].decode() if words[1:3] == [b"-m", b"stretto"] else ""
        if role in ROLES:
            found[role] = int(pid)
    return found


def wait_for_child(popen: subprocess.Popen[str], role: str) -> int:
    for _ in range(3000):
        if role in (found := children(popen.pid)):
            return found[role]
        assert popen.poll() is None, popen.communicate()[0]
        time.sleep(0.01)
    raise AssertionError(f"{role} was never started")


def wait_for_step(job: Job, popen: subprocess.Popen[str], step: int) -> None:
    for _ in range(6000):
        if (job.run.latest_complete_checkpoint() or 0) >= step:
            return
        assert popen.poll() is None, popen.communicate()[0]
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {step}")


def kill(popen: subprocess.Popen[str], victim: int) -> None:
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        raise AssertionError(f"it had ended by itself: {popen.communicate()[0]}") from None


@pytest.fixture
def start_job(tmp_path: Path, model: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def build(max_steps: int) -> Job:
        jobs.append(Job(tmp_path, model, max_steps))
        return jobs[-1]

    yield build
    for job in jobs:
        job.close()


@pytest.mark.slow
def test_a_run_killed_at_random_moments_goes_on_and_trains_no_rollout_twice(start_job: Callable[..., Job]) -> None:
    job = start_job(100_000)
    moments = random.Random(7)
    words: list[str] = []
    reached = []
    for number in range(NUM_KILLS):
        role = ROLES[number % 3]
        is_in_training = number % 2 == 0
        popen = job.start(*words, is_forked=is_in_training)  # it is killed while it imports, too
        victim = wait_for_child(popen, role)
        everyone = [wait_for_child(popen, other) for other in ROLES]
        if is_in_training:
            wait_for_step(job, popen, (reached[-1] if reached else 0) + moments.randint(1, 8))
            time.sleep(moments.uniform(0.0, 0.3))
        else:  # somewhere in start-up, or shortly after it
            time.sleep(moments.uniform(0.0, 6.0))
        kill(popen, victim)
        output, _ = popen.communicate(timeout=DEADLINE_S)
        assert popen.returncode == 1, output
        assert f"FAILED: {role} (pid {victim}) ended" in output and "SIGKILL (9)" in output, output
        assert not [pid for pid in everyone if is_running(pid)], output
        if job.run.ledger.exists():
            assert audit(job.run) == [], output
        if "--resume" in words:
            assert f"resumed from step {reached[-1]}" in output, output
        words = job.way_on()
        reached.append(job.run.latest_complete_checkpoint() or 0)
    assert reached == sorted(reached), f"the run went backwards: {reached}"

    # One Ctrl-C ends it in good order.
    popen = job.start(*words)
    wait_for_step(job, popen, reached[-1] + 2)
    popen.send_signal(signal.SIGINT)
    output, _ = popen.communicate(timeout=DEADLINE_S)
    assert popen.returncode == 0, output
    assert audit(job.run) == []
    summary = json.loads(job.run.summary.read_text())
    assert summary["resumed"] and summary["steps"] == job.run.latest_complete_checkpoint()


@pytest.mark.slow
def test_a_preempted_run_saves_ends_well_and_goes_on(start_job: Callable[..., Job]) -> None:
    job = start_job(40)
    popen = job.start()
    wait_for_step(job, popen, 3)
    popen.send_signal(signal.SIGTERM)
    output, _ = popen.communicate(timeout=DEADLINE_S)
    assert popen.returncode == 0, output
    saved = job.run.latest_complete_checkpoint()
    assert saved is not None and saved >= 3 and audit(job.run) == []
    popen = job.start("--resume", "--max-steps", str(saved + 2))
    output, _ = popen.communicate(timeout=DEADLINE_S)
    assert popen.returncode == 0 and job.run.latest_complete_checkpoint() == saved + 2, output


def test_a_launcher_that_is_killed_takes_everyone_with_it_and_the_run_goes_on(start_job: Callable[..., Job]) -> None:
    job = start_job(12)
    popen = job.start()
    everyone = [wait_for_child(popen, role) for role in ROLES]
    wait_for_step(job, popen, 2)
    popen.kill()
    popen.communicate()
    # At once: the claim on the directory ends with the last of the children.
    popen = job.start("--resume")
    output, _ = popen.communicate(timeout=DEADLINE_S)
    assert not [pid for pid in everyone if is_running(pid)]
    assert popen.returncode == 0, output
    assert json.loads(job.run.summary.read_text())["steps"] == 12
    assert audit(job.run) == []
