"""Slurm's commands: submit a job, look it up, signal it.

Only sbatch, squeue, scancel and scontrol, which every cluster has; no accounting database is needed.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.base.errors import ConfigError, EngineError
from stretto.base.rundir import COMMAND_VAR, JOB_VAR
from stretto_clusters.placed import node_names

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
UNKNOWN = "Invalid job id"
ENDED_STATES = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "BOOT_FAIL", "OUT_OF_MEMORY"}
    | {"NODE_FAIL", "PREEMPTED", "REVOKED"}
)


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue."""

    state: str
    reason: str
    """Why it waits."""
    nodes: str
    """Its nodes, as Slurm writes a list of nodes."""
    elapsed: str
    """Time since its start, and time left, as Slurm writes times."""
    left: str

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"


_NO_CONTROLLER = re.compile(r"configuration source|contact slurm controller", re.IGNORECASE)
"""What sbatch says where there is no cluster."""


def submit(script: str, typed: Sequence[str] = ()) -> str:
    """Submit a script file; the number of its job.

    typed: the command that the user typed, which the run's messages name; not in the script, as it may hold a key.
    Raises: ConfigError with Slurm's message if it refuses the job.
    """
    result = _run("sbatch", "--parsable", script, env=os.environ | {COMMAND_VAR: shlex.join(typed)})
    if result.returncode:
        reason = _message(result).replace("sbatch: error: ", "")
        if _NO_CONTROLLER.search(reason):
            raise ConfigError(
                "this machine knows or reaches no controller of Slurm; submit from a login node of the cluster, or "
                f"train here with --slurm None. The job's script is {script}."
            )
        raise ConfigError(f"Slurm refuses the job: {reason}. Its script is {script}; correct [slurm].")
    return result.stdout.strip().split(";")[0]


def find_job(job: str) -> Queued | None:
    """A job in the queue; None if it is not there, or no longer there.

    Raises: EngineError if Slurm does not answer.
    """
    result = _run("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T|%r|%N|%M|%L")
    if result.returncode and UNKNOWN not in result.stderr:
        raise EngineError(f"squeue does not answer: {_message(result)}")
    lines = result.stdout.strip().splitlines()
    return Queued(*lines[0].split("|")) if lines else None


def is_live(job: Queued | None) -> bool:
    """Whether the job waits, runs, or will do so again."""
    return job is not None and job.state not in ENDED_STATES


def cancel(job: str) -> None:
    """End a job at once, or take it out of the queue.

    Raises: EngineError if Slurm refuses, or does not answer.
    """
    _checked("scancel", job)


def ask_to_finish(job: str) -> None:
    """Let the launchers of a running job finish the step; the script gets no signal, so it does not requeue.

    Raises: EngineError if Slurm refuses, or does not answer.
    """
    _checked("scancel", "--signal=USR2", job)


def nodes_of(job: str) -> list[str]:
    """The nodes of a running job, without those that it has lost; [] if it does not run.

    Raises: EngineError if Slurm does not answer.
    """
    queued = find_job(job)
    return node_names(queued.nodes) if queued is not None and queued.is_running else []


def submit_text(script: str) -> str:
    """Submit the text of a script from within a job; the number of its job.

    Raises: EngineError if Slurm refuses it.
    """
    env = {key: value for key, value in os.environ.items() if key == "SLURM_CONF" or not key.startswith("SLURM")}
    result = _run("sbatch", "--parsable", text=script, env=env)
    if result.returncode:
        raise EngineError(f"sbatch refuses a job: {_message(result)}")
    return result.stdout.strip().split(";")[0]


def requeue(job: str) -> bool:
    """Queue a job again, which ends its processes; whether Slurm does so."""
    if (result := _run("scontrol", "requeue", job)).returncode:
        logger.warning("job %s is not queued again: %s", job, _message(result))
    return result.returncode == 0


def signal_steps(job: str, name: str) -> None:
    """Send a signal to all steps of a job that still run, but not to its script."""
    _try("scancel", f"--signal={name}", job)


def cancel_named(name: str) -> None:
    """End this user's jobs of a name."""
    _try("scancel", f"--name={name}")


def end_other_nodes() -> None:
    """On the first node of a step over several: let the launchers of the other nodes end, as the run has ended.

    They get SIGHUP, which their children ignore, and end their children. If Slurm does not answer, the result of the
    run stays the same.
    """
    if (step := _this_step()) is not None and shutil.which("scancel"):
        _try("scancel", "--signal=HUP", step)


def requeue_this() -> None:
    """On the first node of a step over several, which noticed a lost node before Slurm did: queue the job again.

    If the job has been queued again already, it has lost this node, and nothing is done.
    """
    if (step := _this_step()) is None or not shutil.which("scontrol"):
        return
    job = step.partition(".")[0]
    try:
        result = _run("squeue", "--noheader", f"--jobs={job}", "--Format=RestartCnt")
        if result.stdout.strip() == os.environ.get("SLURM_RESTART_COUNT", "0"):
            requeue(job)
    except EngineError as error:
        logger.warning("%s", error)


def _this_step() -> str | None:
    """The step of this process, JOB.STEP; None outside of a job, or if its step has only this node."""
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "")
    is_ours = job and os.environ.get(JOB_VAR, job) == job  # otherwise Ray runs in the job, and started this
    is_wide = step.isdigit() and os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1"
    return f"{job}.{step}" if is_ours and is_wide else None


def _message(result: subprocess.CompletedProcess[str]) -> str:
    """The error output of a command in one line."""
    return " ".join(result.stderr.split())


def _checked(*words: str) -> None:
    if (result := _run(*words)).returncode:
        raise EngineError(f"`{' '.join(words)}` failed: {_message(result)}")


def _try(*words: str) -> None:
    """Run a command that may fail: without it, jobs and steps end later, by themselves."""
    try:
        _run(*words)
    except EngineError as error:
        logger.warning("%s", error)


def _run(
    *words: str, text: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"[slurm]: there is no `{words[0]}` on this machine; run the command where Slurm is installed, such as the "
            "cluster's login node, or leave [slurm] out (--slurm None) to run here."
        )
    try:
        return subprocess.run(
            words, capture_output=True, text=True, input=text, env=env, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as cause:
        raise EngineError(f"`{' '.join(words)}` did not answer within {TIMEOUT_S:g} s") from cause
