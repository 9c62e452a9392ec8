"""launch/run/supervisor.py with small scripts in place of the three processes: how a run ends.

The launcher is forked (processes/forked.py), but where it is killed; it starts the scripts as it starts processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import forked
from waiting import is_running, until

from stretto.base.status import FINISH_VAR

pytestmark = pytest.mark.heavy

# A stand-in for one process of a run: it does what `plan` says, and leaves files in its directory.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from stretto.base.status import report, wait_for_go
role, plan, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
stop = []
if "early" in plan:
    (directory / f"{role}.imported").touch()
    wait_for_go()
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
if "deaf" in plan:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"{role} is up", flush=True)
(directory / f"{role}.pid").write_text(str(os.getpid()))
if "checks" in plan:
    while not (directory / "trainer.imported").exists():
        time.sleep(0.01)
if role == "orchestrator" and "unchecked" not in plan:
    report("phase", text="waiting for the engine", is_early=True)
if "talks" in plan:
    report("step", step=1, max_steps=3, reward=0.5)
if "says" in plan:
    print("error: it says why", flush=True)
if "late" in plan:
    while not (directory / "follower_ended").exists():
        time.sleep(0.01)
    time.sleep(0.2)
if "second" in plan:
    print("error: orchestrator (pid 1) ended while this rank was still working; see its log.", flush=True)
    (directory / "follower_ended").touch()
if "future" in plan:
    log = directory / "logs" / f"{role}.log"
    os.utime(log, (time.time() + 3600, time.time() + 3600))
if "exits" in plan:
    sys.exit(int(plan.split("exits")[1]))
while True:
    time.sleep(0.01)
    if stop and "finishes" in plan:
        (directory / "finished").touch()
        sys.exit(0)
    if "follows" in plan and (directory / "finished").exists():
        sys.exit(0)
"""

LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from stretto.base import process
from stretto.base.paths import RunDir
from stretto.launch.run.console import Console
from stretto.launch.run.supervisor import STOP_SIGNALS, Supervisor, Timeouts
from stretto.launch.plan.processes import ProcessSpec
directory, stand_in = Path(sys.argv[1]), sys.argv[2]
given = eval(sys.argv[3])
most, process.RESTART_EARNED_S = given.pop("max_restarts", 0), given.pop("earn_s", process.RESTART_EARNED_S)
timeouts = Timeouts(**given)
specs = [
    ProcessSpec(
        role, 0, 1, (sys.executable, "-c", stand_in, role, plan, str(directory)), {}, (), 1, {}, most,
        imports_early="early" in plan,
    )
    for role, plan in (pair.split("=") for pair in sys.argv[4:])
]
causes = {"orchestrator": "LIKELY CAUSE"}
supervisor = Supervisor(specs, RunDir(directory), Console(sys.stdout), timeouts=timeouts, likely_causes=causes)
code = asyncio.run(supervisor.run())
for number in STOP_SIGNALS:
    os.kill(os.getpid(), number)  # too late to change the exit status
sys.exit(code)
"""


class Launcher:
    """A launcher with stand-ins, in a separate process."""

    def __init__(
        self, directory: Path, timeouts: dict | None = None, start: type[subprocess.Popen] = forked.Popen, **plans: str
    ) -> None:
        self.directory = directory
        self.roles = list(plans)
        timeouts = {"stall_s": 600.0, "finish_s": 600.0, "grace_s": 1.0} | (timeouts or {})
        pairs = [f"{role}={plan}" for role, plan in plans.items()]
        self.popen = start(
            [sys.executable, "-c", LAUNCHER, str(directory), STAND_IN, repr(timeouts), *pairs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    async def pid(self, role: str) -> int:
        path = self.directory / f"{role}.pid"
        await until(lambda: path.exists() and path.read_text())
        return int(path.read_text())

    async def is_up(self) -> None:
        for role in self.roles:
            await self.pid(role)

    async def says(self, text: str) -> None:
        """Read output until a line holds the text."""
        assert self.popen.stdout is not None
        async with asyncio.timeout(120):
            while text not in (line := await asyncio.to_thread(self.popen.stdout.readline)):
                assert line, f"the launcher ended without saying {text!r}"

    async def end(self) -> tuple[int, str]:
        output, _ = await asyncio.to_thread(self.popen.communicate, timeout=120)
        return self.popen.returncode, output

    async def all_have_ended(self) -> None:
        for role in self.roles:
            # A process that was stopped at once has written no pid.
            if (self.directory / f"{role}.pid").exists():
                pid = await self.pid(role)
                await until(lambda pid=pid: not is_running(pid))


ALL = {"inference": "waits", "orchestrator": "talks finishes", "trainer": "follows"}


@pytest.mark.parametrize("victim", ["inference", "orchestrator", "trainer"])
async def test_any_killed_process_ends_the_run_with_its_name_its_signal_and_its_last_lines(
    tmp_path: Path, victim: str
) -> None:
    launcher = Launcher(tmp_path, **ALL)
    await launcher.is_up()
    os.kill(await launcher.pid(victim), signal.SIGKILL)
    code, output = await launcher.end()
    assert code == 1
    assert f"FAILED: {victim} (pid" in output and "killed by SIGKILL (9)" in output
    assert f"    {victim} is up" in output
    await launcher.all_have_ended()


async def test_other_processes_are_not_started_before_the_orchestrator_has_checked_everything(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator="unchecked says exits2", trainer="waits")
    code, output = await launcher.end()
    assert code == 2 and output.startswith("error: it says why") and "stopped" not in output
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["orchestrator.log"]


async def test_a_process_that_imports_early_does_nothing_more_when_a_check_fails(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator="checks unchecked says exits2", trainer="early")
    code, output = await launcher.end()
    assert code == 2 and output.startswith("error: it says why") and "stopped" not in output
    assert (tmp_path / "logs" / "trainer.log").read_text() == ""
    assert not (tmp_path / "trainer.pid").exists() and not (tmp_path / "logs" / "inference.log").exists()


async def test_a_process_that_imports_early_goes_on_when_everything_is_checked(tmp_path: Path) -> None:
    plans = {"inference": "waits", "orchestrator": "checks talks finishes", "trainer": "early follows"}
    launcher = Launcher(tmp_path, **plans)
    await until(lambda: (tmp_path / "trainer.imported").exists())
    await launcher.is_up()
    os.kill(await launcher.pid("orchestrator"), signal.SIGINT)
    code, output = await launcher.end()
    assert code == 0 and "step 1/3" in output
    await launcher.all_have_ended()


async def test_processes_that_ignore_sigterm_are_killed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="deaf", orchestrator="deaf talks", trainer="deaf")
    await launcher.is_up()
    os.kill(await launcher.pid("trainer"), signal.SIGKILL)
    assert (await launcher.end())[0] == 1
    await launcher.all_have_ended()


async def test_a_run_succeeds_when_orchestrator_and_trainer_do_and_inference_is_stopped(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator="talks exits0", trainer="exits0")
    code, output = await launcher.end()
    assert code == 0 and "step 1/3 | reward 0.500" in output and "FAILED" not in output
    await launcher.all_have_ended()


async def test_a_job_that_was_asked_to_finish_before_this_process_was_there_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step is finished; without the marker that file is only a name."""
    monkeypatch.setenv(FINISH_VAR, str(tmp_path / "finish"))
    (tmp_path / "finish").touch()
    launcher = Launcher(tmp_path, **ALL)
    code, output = await launcher.end()
    assert code == 0 and "SIGUSR2: finishing this step" in output
    (tmp_path / "finish").unlink()
    launcher = Launcher(tmp_path, inference="waits", orchestrator="talks exits0", trainer="exits0")
    code, output = await launcher.end()
    assert code == 0 and "SIGUSR2" not in output


async def test_an_exit_code_of_the_trainer_is_reported(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator="talks finishes", trainer="exits3")
    code, output = await launcher.end()
    assert code == 1 and "FAILED: trainer" in output and "exit code 3" in output


async def test_a_rank_that_ends_because_the_orchestrator_does_is_not_named_in_its_place(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator="talks late says exits1", trainer="second exits1")
    code, output = await launcher.end()
    assert code == 1 and "FAILED: orchestrator" in output and "FAILED: trainer" not in output


@pytest.mark.parametrize(("end", "is_explained"), [("exits3", True), ("exits1", True), ("talks says exits1", False)])
async def test_an_unexplained_end_is_reported_with_its_likely_cause(
    tmp_path: Path, end: str, is_explained: bool
) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator=end, trainer="waits")
    code, output = await launcher.end()
    assert code == 1 and "FAILED: orchestrator" in output and ("LIKELY CAUSE" in output) == is_explained


async def test_a_process_that_was_asked_to_end_from_outside_is_not_blamed_on_an_environment(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator="talks waits", trainer="waits")
    await launcher.is_up()
    os.kill(await launcher.pid("orchestrator"), signal.SIGTERM)
    code, output = await launcher.end()
    assert code == 1 and "killed by SIGTERM (15): it was asked to end from outside" in output
    assert "LIKELY CAUSE" not in output and "`scancel`" in output


@pytest.mark.parametrize("is_launcher_first", [True, False])
@pytest.mark.parametrize("role", ["orchestrator", "trainer"])
async def test_a_run_whose_processes_are_all_asked_to_end_has_not_failed(
    tmp_path: Path, role: str, is_launcher_first: bool
) -> None:
    """A scheduler that cancels a job, and systemd, send SIGTERM to every process of it, in any order."""
    launcher = Launcher(tmp_path, inference="waits", orchestrator="talks waits", trainer="waits")
    await launcher.is_up()
    await launcher.says("step 1/3")
    pids = [launcher.popen.pid, await launcher.pid(role)]
    for pid in pids if is_launcher_first else reversed(pids):
        os.kill(pid, signal.SIGTERM)
    code, output = await launcher.end()
    assert code == 130 and "stopped at once; the last complete checkpoint" in output
    assert "FAILED" not in output


async def test_engines_that_end_with_the_whole_run_are_not_started_anew(tmp_path: Path) -> None:
    """They end with 0 at SIGTERM."""
    plans = {"inference": "late exits0", "orchestrator": "talks waits", "trainer": "waits"}
    launcher = Launcher(tmp_path, {"max_restarts": 2}, **plans)
    await launcher.is_up()
    await launcher.says("step 1/3")
    launcher.popen.send_signal(signal.SIGTERM)
    await launcher.says("finishing this step")
    (tmp_path / "follower_ended").touch()
    code, output = await launcher.end()
    assert code == 130 and "anew" not in output and "FAILED" not in output


@pytest.mark.parametrize("status", [1, 2])
async def test_an_error_before_the_first_rollout_is_shown_as_the_commands_own(tmp_path: Path, status: int) -> None:
    launcher = Launcher(tmp_path, inference="waits", orchestrator=f"says exits{status}", trainer="waits")
    code, output = await launcher.end()
    assert code == status and "FAILED" not in output and "\nerror: " in f"\n{output}"
    assert f"  (from orchestrator; its log is {tmp_path / 'logs' / 'orchestrator.log'})" in output


async def test_inference_that_ends_by_itself_is_a_failure(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, **(ALL | {"inference": "exits0"}))
    code, output = await launcher.end()
    assert code == 1 and "FAILED: inference" in output and "not asked to end" in output


async def kill_again_and_again(launcher: Launcher, ran_s: float) -> None:
    """Kill the engine three times, each time after it has run for so long."""

    def is_next(pid: int) -> bool:
        found = (launcher.directory / "inference.pid").read_text()
        return launcher.popen.poll() is not None or found not in ("", str(pid))

    for _ in range(3):
        pid = await launcher.pid("inference")
        await asyncio.sleep(ran_s)
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: is_next(pid))


async def test_an_engine_that_runs_for_long_is_started_anew_however_often_it_is_killed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, {"max_restarts": 1, "earn_s": 0.5}, inference="waits")
    await kill_again_and_again(launcher, 0.6)
    assert launcher.popen.poll() is None
    launcher.popen.send_signal(signal.SIGTERM)
    code, output = await launcher.end()
    assert code == 0 and output.count("and was started anew; 0 more times allowed") == 3


async def test_an_engine_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, {"max_restarts": 2}, inference="exits3")
    code, output = await launcher.end()
    assert (
        code == 1
        and output.count("inference ended (exit code 3) and was started anew") == 2
        and "FAILED: inference" in output
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_one_signal_lets_the_orchestrator_finish_its_step(tmp_path: Path, number: signal.Signals) -> None:
    launcher = Launcher(tmp_path, **ALL)
    await launcher.is_up()
    await launcher.says("step 1/3")
    launcher.popen.send_signal(number)
    code, output = await launcher.end()
    assert code == 0 and "finishing this step" in output
    assert (tmp_path / "finished").exists()
    await launcher.all_have_ended()


async def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, **(ALL | {"orchestrator": "talks"}))
    await launcher.is_up()
    await launcher.says("step 1/3")
    launcher.popen.send_signal(signal.SIGINT)
    await launcher.says("finishing this step")
    launcher.popen.send_signal(signal.SIGINT)
    code, output = await launcher.end()
    assert code == 130 and "stopped at once" in output
    await launcher.all_have_ended()


async def test_a_signal_before_the_first_report_has_nothing_to_save(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, **(ALL | {"orchestrator": "waits"}))
    await launcher.is_up()
    launcher.popen.send_signal(signal.SIGINT)
    code, output = await launcher.end()
    assert code == 0 and "nothing to save" in output
    await launcher.all_have_ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_the_orchestrator_checks_ends_it_and_starts_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    launcher = Launcher(tmp_path, **(ALL | {"orchestrator": "unchecked waits"}))
    await launcher.pid("orchestrator")
    launcher.popen.send_signal(number)
    code, output = await launcher.end()
    assert code == 0 and "nothing to save" in output
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["orchestrator.log"]
    await launcher.all_have_ended()


async def test_a_signal_while_processes_wait_for_each_other_stops_at_once(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, **(ALL | {"orchestrator": "finishes"}))
    await launcher.is_up()
    await launcher.says("waiting for the engine")
    launcher.popen.send_signal(signal.SIGINT)
    code, output = await launcher.end()
    assert code == 0 and "nothing to save" in output and not (tmp_path / "finished").exists()
    await launcher.all_have_ended()


async def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, start=subprocess.Popen, inference="deaf", orchestrator="talks", trainer="deaf")
    await launcher.is_up()
    launcher.popen.kill()
    await launcher.end()
    await launcher.all_have_ended()


async def test_a_stalled_run_is_stopped(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, {"stall_s": 1.0}, **ALL)
    code, output = await launcher.end()
    assert code == 70 and "nothing moved for 1s" in output and "from orchestrator, trainer" in output


async def test_a_run_stalls_whatever_the_dates_of_its_logs(tmp_path: Path) -> None:
    """The clock was set back by an hour, or it is that of a file server."""
    launcher = Launcher(tmp_path, {"stall_s": 1.0}, **(ALL | {"trainer": "future"}))
    code, output = await launcher.end()
    assert code == 70 and "nothing moved for 1s" in output


async def test_a_trainer_that_does_not_end_after_the_orchestrator_is_named(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, {"end_s": 0.3}, inference="waits", orchestrator="exits0", trainer="waits")
    code, output = await launcher.end()
    assert code == 70 and "orchestrator ended 0.3s ago and trainer did not" in output


async def test_a_resumed_process_appends_to_its_log_and_only_its_own_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer.log"
    log.parent.mkdir()
    log.write_text("of the run before\n")
    launcher = Launcher(tmp_path, **(ALL | {"trainer": "exits3"}))
    _, output = await launcher.end()
    assert "of the run before" not in output
    assert log.read_text() == "of the run before\ntrainer is up\n"
