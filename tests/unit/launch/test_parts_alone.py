"""An orchestrator or a trainer that is started alone claims its part of the run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ports import free_port
from processes import forked

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir

pytestmark = pytest.mark.heavy

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an orchestrator or trainer without a launcher, with a model that it creates."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str, verb: str = "orchestrator") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stretto", verb, "--output-dir", str(tmp_path), "--run.name", "run"]
        if verb == "orchestrator":
            command += ["--env.0.id", "sort-letters", "--log.level", "debug"]
        command += [
            "--seq-len",
            "256",
            "--model.scratch.num-layers",
            "1",
            "--control.port",
            str(free_port()),
            "--rollout-transport.port",
            str(free_port()),
        ]
        running.append(forked.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return running[-1]

    yield begin
    for each in running:
        if each.poll() is None:
            each.kill()
            each.communicate()


def until(is_so: Callable[[], object], popen: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert popen.poll() is None, popen.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_orchestrator_is_refused_and_the_first_ends_at_the_first_sigterm(start: Start, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    first = start()
    until(
        lambda: run.log("orchestrator").exists() and "waiting for the engine" in run.log("orchestrator").read_text(),
        first,
    )
    second = start()
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 2 and len(output.splitlines()) == 1, output
    assert f"in use as its orchestrator by process {first.pid}" in output or "exists in" in output

    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 0, output

    again = start()
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 2 and "exists in" in output and "--resume" in output and len(output.splitlines()) == 1


def test_orchestrator_and_trainer_share_a_run_without_a_launcher(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with (
        rundir.claim_part(run, "trainer", is_new=True, clean=False),
        rundir.claim_part(run, "orchestrator", is_new=True, clean=False),
    ):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            rundir.claim(run, resume=False, step=None, clean=False)
        with (
            pytest.raises(ConfigError, match=f"in use as its trainer by process {os.getpid()}"),
            rundir.claim_part(run, "trainer", is_new=True, clean=False),
        ):
            pass
    claim = rundir.claim(run, resume=False, step=None, clean=False)
    with pytest.raises(ConfigError, match="in use by process"), rundir.claim_part(
        run, "trainer", is_new=True, clean=False
    ):  # fmt: skip
        pass
    claim.close()


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_an_existing_run_is_resumed_or_refused(tmp_path: Path, role: str) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoint(3).mkdir(parents=True)
    run.complete_marker(3).touch()
    with (
        pytest.raises(ConfigError, match=r"checkpoints of steps 3\).*--resume"),
        rundir.claim_part(run, role, is_new=True, clean=False),
    ):
        pass
    with (
        rundir.claim_part(run, role, is_new=False, clean=False),
        pytest.raises(ConfigError, match=f"in use as its {role} by process"),
        rundir.claim_part(run, role, is_new=True, clean=False),
    ):
        pass
    with pytest.raises(ConfigError, match="--clean"), rundir.claim_part(run, role, is_new=True, clean=True):
        pass
    assert run.complete_checkpoints() == [3]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"cannot use .*run directory: .*output_dir"):
        rundir.claim(RunDir(tmp_path / "run"), resume=False, step=None, clean=False)


@pytest.mark.parametrize("place", ["file/run", "/proc/1/run"])
def test_a_path_where_no_directory_can_be_created_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another"):
        rundir.claim(RunDir(tmp_path / place), resume=False, step=None, clean=False)
    with pytest.raises(ConfigError, match="give another"), rundir.claim_part(
        RunDir(tmp_path / place), "trainer", is_new=True, clean=False
    ):  # fmt: skip
        pass
