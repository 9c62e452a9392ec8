"""A job of several replicas of inference: which losses it survives, and the job that waits for a lost node."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto.base.paths import RunDir
from stretto.check.nodes import FIRST_NODE_VAR, find_node_rank
from stretto_clusters.slurm import commands, steps
from stretto_clusters.slurm.steps import Job, StandIn, run_steps

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=r
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --output=OUT/job.log
#SBATCH --gres=gpu:8
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR2@600
#SBATCH --nodelist=a,b
#SBATCH --constraint=h200
set -eu
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """One node of the trainer, two replicas of two nodes."""
    run = RunDir(tmp_path / "r")
    run.slurm.mkdir(parents=True)
    (run.slurm / "job.sh").write_text(SCRIPT)
    setup = ["bash", "-c", 'echo "it\'s here"; exec "$@"', str(run.slurm / "rl.json")]
    return Job("7", ["a", "b", "c", "d", "e"], 1, 2, setup, ["stretto", "rl"], run)


def test_a_replica_is_there_as_long_as_none_of_its_nodes_is_lost(job: Job) -> None:
    assert job.has_replica
    job.stand_ins["c"] = StandIn("8", 0.0)
    assert job.has_replica, "d and e"
    job.stand_ins["d"] = StandIn("9", 0.0)
    assert not job.has_replica
    job.stand_ins["d"].is_running = True
    assert job.has_replica, "d is back"


def test_a_node_that_is_lost_again_gets_another_job(
    job: Job, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "SUBMIT_PAUSE_S", 0.0)
    say("sbatch", f"n=$(grep -c ^sbatch {tmp_path}/called); if ((n == 2)); then exit 1; fi; echo $((7 + n))")

    def look(state: str) -> str | None:
        """The job of the lost node, now that the last one has this state; after it the number of jobs so far."""
        jobs = f'case "$*" in *--jobs=7*) {SQUEUE.replace(",b,", ",")};; *) {state};; esac'
        say("squeue", jobs)
        job.find_lost_nodes()
        return job.stand_ins["b"].number

    def of(state: str) -> str:
        return f'echo "{state}|None|b|1:00|2:00"'

    assert look(of("PENDING")) == "8" and look(of("PENDING")) == "8", "it waits"
    assert look(of("RUNNING")) == "8" and job.stand_ins["b"].is_running
    assert look(of("NODE_FAIL")) is None and not job.stand_ins["b"].is_running
    assert "b is lost again: job 8 is NODE_FAIL" in caplog.text and "b stays away: sbatch refuses" in caplog.text
    assert look("") == "10", "the second was refused"
    assert look("echo slurm_load_jobs error: Invalid job id >&2; exit 1") == "11"
    assert look("echo no answer >&2; exit 1") == "11", "Slurm does not answer"
    monkeypatch.setattr(steps, "SUBMIT_PAUSE_S", 600.0)
    assert look(of("FAILED")) == "11", "not at once"
    monkeypatch.setattr(steps, "SUBMIT_PAUSE_S", 0.0)
    assert look(of("CANCELLED")) == look(of("NODE_FAIL")) == "11", "somebody wants it so"


def test_the_job_that_waits_for_a_node_has_the_options_of_the_first_but_one_node(job: Job) -> None:
    text = job.stand_in_script("d")
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert [line.removeprefix("#SBATCH --") for line in options] == [
        "ntasks-per-node=1",
        "output=OUT/job.log",
        "gres=gpu:8",
        "constraint=h200",
        "nodes=1",
        "nodelist=d",
        "job-name=node-of-7",
        "no-requeue",
    ]
    assert "export STRETTO_JOB=7 STRETTO_FIRST_NODE=3\n" in text and "--stand-in a srun " in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_node_counts_from_the_first_one_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["a", "b", "c", "d"]
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert find_node_rank(None, hosts, "deployment.node_rank") == 1
    monkeypatch.setenv(FIRST_NODE_VAR, "2")
    assert find_node_rank(None, hosts, "deployment.node_rank") == 3


# -- Slurm's answers, by commands of its names --

Say = Callable[[str, str], None]
SQUEUE = 'echo "RUNNING|None|a,b,c,d,e|1:00|2:00"'


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """Give a command of Slurm a text in bash; what is called, with its words, is in tmp_path/called."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    (tmp_path / "bin").mkdir()

    def write(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/called\n{text}\n')
        path.chmod(0o755)

    for name in ("scancel", "scontrol", "sbatch"):
        write(name, "")
    write("squeue", SQUEUE)
    write("srun", "exec sleep 600")
    before = signal.getsignal(signal.SIGTERM)
    yield write
    signal.signal(signal.SIGTERM, before)


def called(path: Path) -> list[str]:
    return (path / "called").read_text().splitlines()


REFUSED = 'echo "scontrol: error: Requested operation is presently disabled for job 7" >&2; exit 1'


@pytest.mark.heavy
def test_a_job_that_may_not_be_queued_again_ends_when_no_replica_is_left(
    job: Job, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "POLL_S", 0.0)
    say("squeue", SQUEUE.replace("b,c,d,e", "c,e"))
    say("scontrol", REFUSED)
    say("scancel", f'case "$1" in --signal=HUP) kill $(cat {tmp_path}/pids);; esac')
    say("srun", f'if [ "${{@: -1}}" != true ]; then echo $$ >>{tmp_path}/pids; exec sleep 600; fi')
    assert run_steps(job) == 128 + signal.SIGTERM
    assert "scancel --signal=HUP 7" in called(tmp_path), "the engines are told"
    assert "no replica of inference has all its nodes: the job ends" in caplog.text
    assert all(step.returncode is not None for step in job.engines.values())


def test_a_job_that_slurm_ends_starts_no_step_again(job: Job, say: Say) -> None:
    """Engines end with 0 when the job is cancelled."""
    say("srun", "exit 0")
    job.start_engines("d")
    job.engines["d"].wait()
    job.is_ended_by_slurm = True
    job.restart_ended()
    assert not job.restart_at
    job.is_ended_by_slurm = False
    job.restart_ended()
    assert [*job.restart_at] == ["d"]


def test_the_job_knows_what_was_typed_and_its_script_does_not(say: Say, tmp_path: Path) -> None:
    """It may hold a key."""
    say("sbatch", f'echo "$STRETTO_COMMAND" >{tmp_path}/typed; echo 7')
    assert commands.submit("job.sh", ["rl", "@", "my run.toml", "--inference.api-key", "k"]) == "7"
    assert (tmp_path / "typed").read_text() == "rl @ 'my run.toml' --inference.api-key k\n"
    assert called(tmp_path) == ["sbatch --parsable job.sh"]


def test_a_run_that_is_cancelled_or_fails_by_itself_is_not_queued_again(job: Job, say: Say, tmp_path: Path) -> None:
    say("srun", "exit 3")
    for state in ("CANCELLED", "COMPLETING"):
        say("squeue", f'echo "{state}|None|a,b,c,d,e|1:00|2:00"')
        assert not job.has_lost_lead()
    say("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    assert not job.has_lost_lead()
    say("squeue", SQUEUE)
    assert job.has_lost_lead(), "the node has no answer"
    say("srun", "exit 0")
    assert not job.has_lost_lead()
    say("squeue", SQUEUE.replace("a,b", "b"))
    assert job.has_lost_lead()


def test_the_watch_ends_a_job_that_may_not_be_queued_again(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "POLL_S", 0.0)
    say("squeue", SQUEUE.replace("a,b", "b"))
    say("scontrol", REFUSED)
    assert steps.watch("7", "a") == 0
    assert called(tmp_path)[-1] == "scancel 7"


def test_a_node_that_is_back_goes_on_while_slurm_does_not_answer(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times squeue does not answer; then the run's job has ended, and the part of it here is told so."""
    monkeypatch.setattr(steps, "POLL_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    ended = "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1"
    count = f"echo >>{tmp_path}/asked; n=$(wc -l <{tmp_path}/asked)"
    later = f"until [ -s {tmp_path}/pid ]; do sleep 0.1; done; if ((n > 4)); then {ended}; else {down}; fi"
    say("squeue", f"{count}; if ((n > 1)); then {later}; fi; {SQUEUE}")
    say("scancel", f"kill $(cat {tmp_path}/pid)")
    assert steps.stand_in("7", "a", ["bash", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 600"]) == 0
    assert (tmp_path / "asked").read_text().count("\n") == 6
    assert "scancel --signal=HUP 8" in called(tmp_path)


def test_how_a_run_has_ended_does_not_depend_on_slurms_answer(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.1)
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    say("scancel", "exec sleep 600")
    commands.end_other_nodes()
    assert "scancel --signal=HUP 7.0` did not answer within 0.1 s" in caplog.text


def test_a_job_whose_first_node_misses_another_is_queued_again_once(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if it has been started again since: then this node was the one that was lost."""
    say("squeue", "echo '1    '")
    commands.requeue_this()
    assert not (tmp_path / "called").exists(), "this is no job"
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    commands.requeue_this()
    assert [line.split()[0] for line in called(tmp_path)] == ["squeue"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    commands.requeue_this()
    assert called(tmp_path)[-1] == "scontrol requeue 7"
