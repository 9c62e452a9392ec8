"""Runs a job of `rl` with several replicas of inference: the run goes on when it loses a node of inference.

The job's script starts it on the first node, as `... --lead N --each M SETUP -- COMMAND`:

    N nodes of the trainer   one step (srun) for all. If one of these nodes is lost, the job is queued again.
    M nodes per replica      one step per node, which is started again whenever it ends
    a lost inference node    Slurm takes it out of the job. A job of its own, the stand-in, waits for the node and does
                             its work when it is back; if the node is lost again, another stand-in is submitted. The
                             orchestrator goes on with the other engines and admits those of this node again. If no
                             replica has all its nodes, the job is queued again.
    the first node is lost   this process is lost, too: two nodes of inference watch the first one

SETUP begins every command on a node (bash and its script), COMMAND is `stretto rl` with the hosts. Slurm is polled
every POLL_S seconds.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from stretto.base.errors import StrettoError
from stretto.base.paths import RunDir
from stretto.base.process import exit_status
from stretto.check.nodes import FIRST_NODE_VAR
from stretto_clusters.placed import node_names
from stretto_clusters.slurm import commands

logger = logging.getLogger(__name__)

POLL_S = 5.0
PAUSE_S = 10.0  # before a node's step is started again
END_S = 60.0  # for the engines to end after the trainer
CHECK_S = 60.0  # for a node of the trainer to answer after a failure
SUBMIT_PAUSE_S = 30.0  # between two jobs for the same lost node
NUM_WATCHERS = 2
NOT_COPIED = ("--nodes", "--nodelist", "--exclude", "--signal", "--requeue", "--no-requeue", "--no-kill", "--job-name")
"""Options of the job that a stand-in does not have, or has with other values."""
SRUN = ("srun", "--cpu-bind=none", "--kill-on-bad-exit=1")
WATCH = ("bash", "-c", 'trap "" USR2; exec "$@"', "watch", sys.executable, "-m")
"""Begins the command of a watcher, which ignores SIGUSR2: that signal asks the trainer to finish."""


@dataclass
class StandIn:
    """The job that waits for a lost node, and does the node's work when it is back."""

    number: str | None
    """None: Slurm has refused it."""
    submitted_at: float
    """Monotonic seconds."""
    is_running: bool = False
    """The node is back."""
    is_cancelled: bool = False
    """The user cancelled it: the node stays away."""


@dataclass
class Job:
    """This job, seen from its first node."""

    number: str
    hosts: list[str]
    num_lead: int
    num_each: int
    """Nodes of one replica."""
    setup: list[str]
    command: list[str]
    run: RunDir
    engines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """The step of each inference node that is in the job, by host."""
    restart_at: dict[str, float] = field(default_factory=dict)
    """When to start a node's step again that has ended, monotonic seconds, by host."""
    stand_ins: dict[str, StandIn] = field(default_factory=dict)
    """The stand-ins for nodes that this job has lost, by host."""
    is_ended_by_slurm: bool = False
    """Slurm ends all steps; a signal sent now could reach those of the job's next start."""

    @property
    def stand_in_name(self) -> str:
        return f"node-of-{self.number}"

    def step(self, hosts: Sequence[str], words: Sequence[str], *options: str) -> subprocess.Popen[bytes]:
        """Start a step with one process on each of these nodes, which follow each other in `hosts`."""
        count = str(len(hosts))
        where = (f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(hosts)}")
        env = os.environ | {FIRST_NODE_VAR: str(self.hosts.index(hosts[0]))}
        return subprocess.Popen([*SRUN, *options, *where, *words], env=env)

    def start_engines(self, host: str) -> None:
        self.restart_at.pop(host, None)
        self.engines[host] = self.step([host], [*self.setup, *self.command])

    # -- lost nodes --

    def restart_ended(self) -> None:
        """Start the step of a node again some time after it has ended.

        Raises: _Refused if the step failed before the run had trained anything.
        """
        if self.is_ended_by_slurm:
            return
        for host, step in list(self.engines.items()):
            code = step.poll()
            if code is not None and host not in self.restart_at and host not in self.stand_ins:
                if code and not self.run.metrics("orchestrator").exists() and host in self.nodes():
                    raise _Refused(host, code)
                logger.warning("%s: its step ended with %d; it is started again", host, code)
                self.restart_at[host] = time.monotonic() + PAUSE_S
        for host, at in list(self.restart_at.items()):
            if time.monotonic() >= at:
                self.start_engines(host)

    def nodes(self) -> list[str]:
        """The nodes that the job still has; [] if Slurm does not answer."""
        try:
            return commands.nodes_of(self.number)
        except StrettoError as error:
            logger.warning("%s", error)
            return []

    def find_lost_nodes(self) -> None:
        """Submit a stand-in for each node that Slurm no longer lists."""
        nodes = self.nodes()
        for host in self.hosts[self.num_lead :]:
            if host in self.stand_ins:
                self.check_stand_in(host, self.stand_ins[host])
            elif nodes and host not in nodes:
                logger.warning("%s is lost: the run goes on without it, and admits it again later", host)
                self.restart_at.pop(host, None)
                self.submit_stand_in(host)

    def submit_stand_in(self, host: str) -> None:
        number = None
        try:
            number = commands.submit_text(self.stand_in_script(host))
        except StrettoError as error:
            logger.warning("%s stays away: %s", host, error)
        self.stand_ins[host] = StandIn(number, time.monotonic())

    def check_stand_in(self, host: str, stand_in: StandIn) -> None:
        """Submit another stand-in for a lost node if the last one was lost with it, or was refused."""
        if stand_in.is_cancelled:
            return
        if stand_in.number is not None:
            try:
                queued = commands.find_job(stand_in.number)
            except StrettoError as error:
                logger.warning("%s", error)
                return
            was_running, stand_in.is_running = stand_in.is_running, queued is not None and queued.is_running
            if commands.is_live(queued):
                return
            state = "gone" if queued is None else queued.state
            if state == "CANCELLED":
                logger.warning("job %s, for %s, was cancelled: the node stays away", stand_in.number, host)
                stand_in.is_cancelled = True
                return
            if was_running:
                logger.warning("%s is lost again: job %s is %s", host, stand_in.number, state)
        if time.monotonic() - stand_in.submitted_at >= SUBMIT_PAUSE_S:
            self.submit_stand_in(host)

    @property
    def has_replica(self) -> bool:
        """Whether one replica has all its nodes, each in this job or in a stand-in."""
        away = {host for host, stand_in in self.stand_ins.items() if not stand_in.is_running}
        firsts = range(self.num_lead, len(self.hosts), self.num_each)
        return any(away.isdisjoint(self.hosts[first : first + self.num_each]) for first in firsts)

    def stand_in_script(self, host: str) -> str:
        """The script of a stand-in: it does the work of a lost node when the node is back."""
        lines = (self.run.slurm / "job.sh").read_text().splitlines()
        options = [line for line in lines if line.startswith("#SBATCH ")]
        copied = [line for line in options if line.split()[1].split("=")[0] not in NOT_COPIED]
        added = ("--nodes=1", f"--nodelist={host}", f"--job-name={self.stand_in_name}", "--no-requeue")
        words = [sys.executable, "-m", __spec__.name, "--stand-in", self.hosts[0]]
        env = f"export STRETTO_JOB={self.number} {FIRST_NODE_VAR}={self.hosts.index(host)}"
        command = f"exec {shlex.join([*words, *SRUN, *self.setup, *self.command])}"
        return "\n".join(["#!/bin/bash", *copied, *(f"#SBATCH {each}" for each in added), env, command, ""])

    # -- the end --

    def end_engines(self) -> None:
        """Let the launchers of inference end their processes, and cancel the stand-ins."""
        commands.cancel_named(self.stand_in_name)
        if not self.is_ended_by_slurm:
            commands.signal_steps(self.number, "HUP")
        deadline = time.monotonic() + END_S
        for step in self.engines.values():
            _wait(step, max(0.0, deadline - time.monotonic()))

    def requeue(self, why: str) -> bool:
        """Queue the job again, which ends it; False if it may not be queued again (slurm.requeue = false)."""
        try:
            self.is_ended_by_slurm = commands.requeue(self.number)
        except StrettoError as error:
            logger.warning("%s", error)
        is_again = "the job is queued again" if self.is_ended_by_slurm else "the job ends"
        logger.warning("%s: %s", why, is_again)
        return self.is_ended_by_slurm

    def has_lost_lead(self) -> bool:
        """Whether a node of the trainer is lost; called after a failure, which that would explain.

        False for a job that no longer runs: it was cancelled.
        """
        lead, nodes = self.hosts[: self.num_lead], self.nodes()
        if not nodes or self.is_ended_by_slurm:
            return False
        if not {*lead} <= {*nodes}:
            return True
        step = self.step(lead, ["true"], "--overlap")
        try:
            return step.wait(CHECK_S) != 0
        except subprocess.TimeoutExpired:
            step.kill()
            step.wait()
            return True


def _wait(step: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Wait for the end of a step, and kill its srun, and with it the step, after timeout_s; the exit code."""
    try:
        return step.wait(timeout_s)
    except subprocess.TimeoutExpired:
        step.kill()
        return step.wait()


class _Refused(Exception):
    """A node's step ended before the run had trained anything."""

    def __init__(self, host: str, code: int) -> None:
        super().__init__(f"{host}: its part of the run ended with {code} before the first step; see above")
        self.code = code


def main(words: Sequence[str] | None = None) -> int:
    """Run the part that the words name: the job's steps, a watcher or a stand-in; the exit status."""
    parser = ArgumentParser()
    parser.add_argument("--lead", type=int, default=1)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--stand-in", metavar="FIRST_HOST")
    parser.add_argument("--watch", metavar="FIRST_HOST")
    parser.add_argument("words", nargs=REMAINDER)
    options = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="job | %(message)s", stream=sys.stderr)
    if options.watch:
        return watch(os.environ["SLURM_JOB_ID"], options.watch)
    if options.stand_in:
        return stand_in(os.environ["STRETTO_JOB"], options.stand_in, options.words)
    at = options.words.index("--")
    setup, command = options.words[:at], options.words[at + 1 :]
    hosts = node_names(os.environ["SLURM_JOB_NODELIST"])
    run = RunDir(Path(setup[-1]).parent.parent)  # RUN/slurm/rl.json
    return run_steps(Job(os.environ["SLURM_JOB_ID"], hosts, options.lead, options.each, setup, command, run))


def run_steps(job: Job) -> int:
    """Run the job's steps until that of the trainer has ended; its exit status."""
    commands.cancel_named(job.stand_in_name)  # those of the job's earlier start
    lead = job.step(job.hosts[: job.num_lead], [*job.setup, *job.command])

    def end(number: int, frame: FrameType | None) -> None:
        job.is_ended_by_slurm = True
        lead.terminate()

    signal.signal(signal.SIGTERM, end)
    watcher = [*WATCH, __spec__.name, "--watch", job.hosts[0]]
    watchers = [
        job.step([host], watcher, "--overlap") for host in job.hosts[job.num_lead : job.num_lead + NUM_WATCHERS]
    ]
    status, polled_at = None, time.monotonic()
    for host in job.hosts[job.num_lead :]:
        job.start_engines(host)
    try:
        while (status := lead.poll()) is None:
            time.sleep(1.0)
            job.restart_ended()
            if time.monotonic() - polled_at > POLL_S:
                polled_at = time.monotonic()
                job.find_lost_nodes()
            if not job.has_replica:
                if not job.requeue("no replica of inference has all its nodes"):
                    lead.terminate()
                status = _wait(lead, END_S)
                break
    except _Refused as refused:
        logger.error("%s", refused)
        lead.terminate()
        status = refused.code
        _wait(lead, END_S)
    finally:
        job.end_engines()
        for watching in watchers:
            watching.kill()
            watching.wait()
    if status and job.has_lost_lead():
        job.requeue("a node of the trainer is lost")
    return exit_status(status)


def watch(number: str, first: str) -> int:
    """On a node of inference: queue the job again if its first node is lost, where `run_steps` runs."""
    while True:
        time.sleep(POLL_S)
        try:
            nodes = commands.nodes_of(number)
            if nodes and first not in nodes:
                logger.warning("the first node, %s, is lost: the job is queued again, or ended", first)
                if not commands.requeue(number):
                    commands.cancel(number)
                return 0
        except StrettoError as error:
            logger.warning("%s", error)


def stand_in(number: str, first: str, words: Sequence[str]) -> int:
    """In the job of a node that was lost and is back: do its work, as long as the run's job runs."""
    logger.warning("%s is back", os.environ.get("SLURMD_NODENAME", "the node"))
    while _is_there(number, first):
        step = subprocess.Popen(words)
        while step.poll() is None and _is_there(number, first):
            time.sleep(POLL_S)
        if step.returncode is None:
            commands.signal_steps(os.environ["SLURM_JOB_ID"], "HUP")
            _wait(step, END_S)
        else:
            time.sleep(PAUSE_S)
    return 0


def _is_there(number: str, host: str) -> bool:
    """Whether a job runs and has this node; True while Slurm does not answer."""
    try:
        return host in commands.nodes_of(number)
    except StrettoError as error:
        logger.warning("%s", error)
        return True


if __name__ == "__main__":
    sys.exit(main())
