"""Slurm's commands: submit a job, ask about it, signal it.

Only what every cluster has: sbatch, squeue, scancel and scontrol. No accounting database is asked.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.base.errors import ConfigError, EngineError
from stretto.base.rundir import JOB_VAR
from stretto.config.rules.slurm import node_names

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
UNKNOWN = "Invalid job id"


@dataclass(frozen=True)
class Queued:
    """A job that Slurm knows: its state, why it waits or which nodes it has, and times as Slurm writes them."""

    job: str
    state: str
    reason: str
    nodes: str
    elapsed: str
    left: str

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"


def submit(script: str) -> str:
    """Submit a script file; the number of its job.

    Raises: ConfigError with Slurm's words if it refuses the job.
    """
    ended = _run("sbatch", "--parsable", script)
    if ended.returncode:
        reason = " ".join(ended.stderr.replace("sbatch: error: ", "").split())
        raise ConfigError(f"Slurm refuses the job: {reason}. Its script is {script}; correct [slurm].")
    return ended.stdout.strip().split(";")[0]


def find_job(job: str) -> Queued | None:
    """What the queue says about a job; None if it is not, or no longer, there."""
    ended = _run("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T|%r|%N|%M|%L")
    if ended.returncode and UNKNOWN not in ended.stderr:
        raise EngineError(f"squeue does not answer: {' '.join(ended.stderr.split())}")
    lines = ended.stdout.strip().splitlines()
    return Queued(job, *lines[0].split("|")) if lines else None


def is_live(job: Queued | None) -> bool:
    """Whether the job waits, runs, or will do so again."""
    ended = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "BOOT_FAIL", "OUT_OF_MEMORY")
    return job is not None and job.state not in (*ended, "NODE_FAIL", "PREEMPTED", "REVOKED")


def cancel(job: str) -> None:
    """End a job at once, or take it out of the queue.

    Raises: EngineError if Slurm refuses, or does not answer.
    """
    _checked("scancel", job)


def ask_to_finish(job: str) -> None:
    """Let the launchers of a running job finish the step; the script itself is not told, so it does not requeue."""
    _checked("scancel", "--signal=USR2", job)


def nodes_of(job: str) -> list[str]:
    """The nodes of a running job, without those that it has lost; [] if it does not run.

    Raises: EngineError if Slurm does not answer.
    """
    found = find_job(job)
    return node_names(found.nodes) if found is not None and found.is_running else []


def submit_text(script: str) -> str:
    """Submit a script from within a job; the number of its job.

    Raises: EngineError if Slurm refuses it.
    """
    env = {
        key: value for key, value in os.environ.items() if key == "SLURM_CONF" or not key.startswith("SLURM")
    }
    ended = _run("sbatch", "--parsable", text=script, env=env)
    if ended.returncode:
        raise EngineError(f"sbatch refuses a job: {' '.join(ended.stderr.split())}")
    return ended.stdout.strip().split(";")[0]


def requeue(job: str) -> bool:
    """Queue a job again, if it may be; whoever calls it within the job is then ended. Whether Slurm does so."""
    if (ended := _run("scontrol", "requeue", job)).returncode:
        logger.warning("job %s is not queued again: %s", job, " ".join(ended.stderr.split()))
    return ended.returncode == 0


def signal_steps(job: str, name: str) -> None:
    """Send a signal to all steps of a job that still run, but not to its script."""
    _tried("scancel", f"--signal={name}", job)


def cancel_named(name: str) -> None:
    """End this user's jobs of a name."""
    _tried("scancel", f"--name={name}")


def end_other_nodes() -> None:
    """On the first node of a step over several: tell the launchers of the others that the run has ended.

    Their children ignore SIGHUP; the launcher ends them. How the run has ended is known: a Slurm that does not answer
    changes nothing of it.
    """
    if (step := _own_step()) is not None and shutil.which("scancel"):
        _tried("scancel", "--signal=HUP", step)


def requeue_this() -> None:
    """On the first node of a step over several, which misses another one before Slurm does: queue the job again.

    If the job has been queued again already, this node is the one that was lost to it, and nothing is done.
    """
    if (step := _own_step()) is None or not shutil.which("scontrol"):
        return
    job = step.partition(".")[0]
    try:
        asked = _run("squeue", "--noheader", f"--jobs={job}", "--Format=RestartCnt")
        if asked.stdout.strip() == os.environ.get("SLURM_RESTART_COUNT", "0"):
            requeue(job)
    except EngineError as error:
        logger.warning("%s", error)


def _own_step() -> str | None:
    """The step of this process, JOB.STEP; None outside of a job, or if its step has only this node."""
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "")
    is_ours = (
        job and os.environ.get(JOB_VAR, job) == job
    )  # else Ray, which Slurm has started, has started this
    is_wide = step.isdigit() and os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1"
    return f"{job}.{step}" if is_ours and is_wide else None


def _checked(*words: str) -> None:
    ended = _run(*words)
    if ended.returncode:
        raise EngineError(f"`{' '.join(words)}` failed: {' '.join(ended.stderr.split())}")


def _tried(*words: str) -> None:
    """Run what is worth no failure: without an answer, jobs and steps end later, by themselves."""
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
