"""Runs a plan on this machine: starts the processes, watches them, ends them together, and reports.

States of a run: RUNNING -> FINISHING (asked once to stop: the orchestrator finishes its step and a
checkpoint is saved) -> ENDED; from both, STOPPING when a process fails, is missing at a deadline, or a
second Ctrl-C comes. The children are in process groups of their own, so Ctrl-C reaches only the launcher;
the kernel kills them when it dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stretto.base import log, process, rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.process import Child
from stretto.base.status import STATUS_FD_VAR, SUPERVISED_VAR
from stretto.base.watch import EXIT_STALLED
from stretto.config.load import dump_text
from stretto.config.roots import RLConfig
from stretto.launch import nodes
from stretto.launch import plan as planning
from stretto.launch.console import Console
from stretto.launch.plan import Plan, ProcessSpec

logger = logging.getLogger(__name__)

GRACE_S = 6.0  # between SIGTERM and SIGKILL; with what comes after it, well under 10 s
END_TIMEOUT_S = 120.0  # between the orchestrator's end and the trainer's
STALL_SLACK_S = 60.0  # the processes' own watchdogs fire first and say more
RESTART_GRACE_S = 2.0
WEDGED_AFTER_S = 60.0  # of its life; before, it may be loading its model
SERVERS = ("inference", "teacher", "router", "kv_store")
"""Roles that never end by themselves."""
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class RunState(StrEnum):
    RUNNING = "running"
    FINISHING = "finishing"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class Limits:
    """Longest waits of the launcher, seconds."""

    stall_s: float
    """Without a status line or a log line from anybody."""
    finish_s: float
    """Between the first Ctrl-C and the orchestrator's end."""
    end_s: float = END_TIMEOUT_S
    """Between the orchestrator's end and the trainer's."""
    grace_s: float = GRACE_S
    """Between SIGTERM and SIGKILL."""


def main(cfg: RLConfig) -> int:
    """`rl`: run the three processes to the end; the exit code of the command."""
    run = cfg.run_dir
    if cfg.dry_run:
        return _dry_run(cfg, run)
    _check_model(cfg)
    if cfg.deployment.type == "multi_node":
        hosts = nodes.hosts_of(cfg)
        node = nodes.own_rank(cfg.deployment.node_rank, hosts, "deployment.node_rank")
        if node > 0:
            return _run_other_node(cfg, run, node)
    with closing(rundir.claim(run, **_intent(cfg))) as claim, closing(PortClaims()) as ports:
        plan = _plan(cfg, run, claim.resume_step, ports)
        planning.write(plan, run.path)
        log.setup("launcher", run, cfg.log.level, cfg.log.json_logging, is_quiet=True)
        return _run(plan, claim)


def _plan(cfg: RLConfig, run: RunDir, resume_step: int | None, ports: PortClaims | None = None) -> Plan:
    if resume_step is not None:
        rundir.check_max_steps(cfg.max_steps, resume_step)
    if cfg.deployment.type == "multi_node":
        return nodes.plan_nodes(cfg, run, resume_step)
    return planning.plan(cfg, run, resume_step, ports=ports)


def _run_other_node(cfg: RLConfig, run: RunDir, node: int) -> int:
    """The processes of a node that is not the first: trainer ranks until they end, or servers until told to stop.

    Its configs and logs are in RUN-node-<rank>: RUN itself, which nodes may share, is claimed by the first alone.
    """
    own = RunDir(run.path.with_name(f"{run.path.name}-node-{node}"))
    step = None
    if cfg.resume is not None:
        step = cfg.resume.step
        with suppress(
            ConfigError
        ):  # a node of engines alone need not see checkpoints; ranks say what is missing
            _, step = rundir.find_checkpoint(run, step, cfg.resume.dir)
    plan = nodes.plan_nodes(cfg, run, step)
    own.path.mkdir(parents=True, exist_ok=True)
    planning.write(plan, own.path)
    log.setup("launcher", own, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    specs = [nodes.moved(spec, run, own) for spec in plan.processes if spec.node == node]
    return serve(
        specs, own, f"node {node} of {len(plan.hosts)}, {plan.hosts[node]}", plan.orchestrator.stall_timeout_s
    )


def serve(specs: Sequence[ProcessSpec], run: RunDir, what: str, stall_s: float) -> int:
    """Run processes without an orchestrator; servers alone run until told to stop."""
    console = Console(sys.stdout, max_steps=None)
    names = ", ".join(spec.name for spec in specs)
    console.line(f"{what}: {names}\n  logs     {run.logs}")
    limit = stall_s + STALL_SLACK_S
    supervisor = Supervisor(specs, run, console, limits=Limits(limit, limit))
    try:
        return asyncio.run(supervisor.run())
    finally:
        console.close()


def _dry_run(cfg: RLConfig, run: RunDir) -> int:
    step = rundir.check(run, **_intent(cfg))
    plan = _plan(cfg, run, step)
    # The configs of a run that exists are its record: a dry run writes beside them.
    directory = run.path / "dry_run" if rundir.is_used(run) else run.path
    planning.write(plan, directory)
    written = f"resolved configs and plan.json are in {directory}; dry run: nothing was started"
    sys.stdout.write(f"{dump_text(plan.config)}\n{planning.table(plan)}\n\n{written}\n")
    return 0


def _check_model(cfg: RLConfig) -> None:
    """A model directory that is missing is refused before --clean deletes anything and processes start."""
    name = cfg.model.name
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if cfg.model.scratch is None and not is_hub_name and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"[model] name = {name!r}: there is no such directory. Where the model comes out of a warm-up, "
            f"run that first (`sft @ ...`); else give a directory with config, safetensors and tokenizer."
        )


def _intent(cfg: RLConfig) -> dict[str, Any]:
    """What the user wants of the run directory, as rundir takes it."""
    resume, clean = cfg.resume, cfg.clean
    if resume is None:
        return {"resume": False, "step": None, "clean": clean}
    return {"resume": True, "step": resume.step, "clean": clean, "origin": resume.dir}


def _run(plan: Plan, claim: rundir.Claim) -> int:
    from stretto.launch import report

    console = Console(sys.stdout, max_steps=plan.config.max_steps)
    console.line(report.header(plan))
    stall_s = plan.orchestrator.stall_timeout_s + STALL_SLACK_S
    mine = [spec for spec in plan.processes if spec.node == 0]
    supervisor = Supervisor(
        mine, plan.run, console, limits=Limits(stall_s, stall_s), pass_fds=(claim.lock_fd,)
    )
    try:
        code = asyncio.run(supervisor.run())
    finally:
        console.close()
    console.line(report.ending(plan, is_complete=code == 0, stopped_early=supervisor.was_asked_to_finish))
    return code


class Supervisor:
    """Runs processes until the orchestrator and the trainers have ended, or one fails."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run: RunDir,
        console: Console,
        *,
        limits: Limits,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.state = RunState.RUNNING
        self.was_asked_to_finish = False
        self._specs = specs
        self._run_dir = run
        self._console = console
        self._limits = limits
        self._pass_fds = tuple(pass_fds)
        self._children: dict[str, Child] = {}
        self._roles = {spec.name: spec.role for spec in specs}
        # Without one, whoever it is tells these when to end: trainer ranks end by themselves, servers serve on.
        self._has_orchestrator = any(spec.role == "orchestrator" for spec in specs)
        self._are_servers = all(spec.role in SERVERS for spec in specs)
        self._restarts_left = {spec.name: spec.max_restarts for spec in specs}
        self._status = _StatusPipe(self._on_status)
        self._wake = asyncio.Event()
        self._has_reported = False
        self._moved_at = time.monotonic()
        self._finish_deadline: float | None = None
        self._end_deadline: float | None = None

    async def run(self) -> int:
        """Start, watch, stop; the exit code."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._start()
            return await self._watch()
        finally:
            self.state = RunState.STOPPING
            await self._stop()
            self.state = RunState.ENDED
            for number in signals:
                loop.remove_signal_handler(number)

    def _start(self) -> None:
        for spec in self._specs:
            self._start_one(spec)
        self._status.open()

    def _start_one(self, spec: ProcessSpec) -> Child:
        env, fds = {**spec.env, SUPERVISED_VAR: "1"}, list(self._pass_fds)
        if spec.role == "orchestrator":
            env[STATUS_FD_VAR] = str(self._status.writer)
            fds.append(self._status.writer)
        path = self._run_dir.log(spec.name)
        child = process.start(spec.name, spec.argv, env=env, log=path, pass_fds=fds)
        self._children[spec.name] = child
        return child

    async def _watch(self) -> int:
        running = {asyncio.create_task(child.wait()): child for child in self._children.values()}
        wake = asyncio.create_task(self._wake.wait())
        try:
            while True:
                tasks = {*running, wake}
                done, _ = await asyncio.wait(tasks, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                ended = [running.pop(task) for task in done if task in running]
                # Of several that ended together, one killed by a signal is the likelier cause.
                for child in sorted(ended, key=lambda child: child.returncode or 0):
                    if self._restarts_left[child.name] > 0:
                        again = await self._restart(child)
                        running[asyncio.create_task(again.wait())] = again
                        continue
                    if child.returncode != 0 or self._roles[child.name] in SERVERS:
                        return self._failed(child)
                    logger.info("%s ended", child.name)
                if wake.done():
                    return self._stopped_by_signal()
                working = [c.name for c in running.values() if self._roles[c.name] not in SERVERS]
                if not working and not self._are_servers:
                    return 0
                if self._has_orchestrator and (late := self._overdue(working)):
                    return late
        finally:
            for task in (*running, wake):
                task.cancel()

    async def _restart(self, child: Child) -> Child:
        """Start a server that has ended anew; those who used it try elsewhere or wait for it."""
        returncode = child.returncode
        assert returncode is not None
        self._restarts_left[child.name] -= 1
        await child.end_leftovers(time.monotonic() + RESTART_GRACE_S)
        child.close()
        [spec] = [spec for spec in self._specs if spec.name == child.name]
        again = self._start_one(spec)
        how, left = process.describe_exit(returncode), self._restarts_left[child.name]
        logger.warning("%s (pid %d) ended: %s; started anew, pid=%d", child.name, child.pid, how, again.pid)
        self._console.line(
            f"{child.name} ended ({how}) and was started anew; {left} more time{'s' * (left != 1)} allowed "
            f"(inference.max_restarts)"
        )
        return again

    def _end_wedged(self, url: str) -> None:
        """An engine that no longer answers is killed where it may be started anew; the dead are not touched."""
        port = urlsplit(url).port
        for spec in self._specs:
            child = self._children[spec.name]
            is_it = spec.role == "inference" and port in spec.ports.values()
            is_running = child.returncode is None and time.monotonic() - child.started_at > WEDGED_AFTER_S
            if is_it and is_running and self._restarts_left[spec.name]:
                logger.warning("%s (pid %d) does not answer: killed", child.name, child.pid)
                child.signal_group(signal.SIGKILL)

    # -- what ends a run --

    def _failed(self, child: Child) -> int:
        returncode = child.returncode
        assert returncode is not None
        how = process.describe_exit(returncode)
        if returncode == EXIT_STALLED:
            how += f" (stalled: stacks and queue depths in {self._run_dir.dumps})"
        elif returncode == 0:
            how += " (though nobody asked it to end)"
        elif returncode == -signal.SIGKILL:
            how += ", by hand or because memory ran out (`dmesg` says)"
        after = time.monotonic() - child.started_at
        lines = [f"FAILED: {child.name} (pid {child.pid}) ended after {after:.0f}s: {how}"]
        tail = child.tail()
        lines.append(f"  the end of {child.log}:" if tail else f"  {child.log}: it wrote nothing")
        lines += [f"    {line}" for line in tail]
        logger.error("%s ended: %s", child.name, how)
        self._console.line("\n".join(lines))
        return EXIT_FAILED

    def _stopped_by_signal(self) -> int:
        if not self._has_orchestrator:
            return 0
        if self._has_reported:
            self._console.line("stopped at once; the last complete checkpoint and finished rollouts are kept")
            return EXIT_INTERRUPTED
        self._console.line("stopped before the first step: there was nothing to save")
        return 0

    def _overdue(self, working: list[str]) -> int | None:
        """A deadline that passed ends the run, naming who was waited for."""
        now = time.monotonic()
        if "orchestrator" not in working and self._end_deadline is None:
            self._end_deadline = now + self._limits.end_s
        if self._end_deadline is not None and now > self._end_deadline:
            what = f"the orchestrator ended {self._limits.end_s:g}s ago and {', '.join(working)} did not"
        elif self._finish_deadline is not None and now > self._finish_deadline:
            what = f"waited {self._limits.finish_s:g}s for {', '.join(working)} to finish the step"
        elif now - self._moved() > self._limits.stall_s:
            who = ", ".join(working)
            what = f"nothing moved for {self._limits.stall_s:g}s: no status and no log line from {who}"
        else:
            return None
        for child in self._children.values():
            child.signal(signal.SIGUSR1)  # log.setup made it print all stacks
        logger.error("%s", what)
        self._console.line(f"FAILED: {what}; stacks of all processes are in {self._run_dir.logs}")
        return EXIT_STALLED

    def _moved(self) -> float:
        """When anybody last said anything, as monotonic time."""
        paths = [child.log for child in self._children.values()]
        ages = [time.time() - path.stat().st_mtime for path in paths if path.exists()]
        return max([self._moved_at, *(time.monotonic() - age for age in ages)])

    async def _stop(self) -> None:
        running = [child.name for child in self._children.values() if child.returncode is None]
        started = time.monotonic()
        await process.stop(self._children.values(), grace_s=self._limits.grace_s)
        self._status.close()
        if running and set(running) != {"inference"}:
            self._console.line(f"stopped {', '.join(running)} in {time.monotonic() - started:.1f}s")

    # -- what comes in --

    def _on_status(self, status: dict) -> None:
        self._has_reported = self._has_reported or status.get("kind") != "note"
        self._moved_at = time.monotonic()
        if status.get("kind") == "engine":
            self._console.line(f"engine {status['url']} is {status['state']}: {status['reason']}")
            self._end_wedged(status["url"])
            return
        self._console.show(status)

    def _on_signal(self, number: signal.Signals) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        logger.info("%s while %s", name, self.state)
        if self.state is not RunState.RUNNING or not self._has_reported:
            self._wake.set()
            return
        self.state = RunState.FINISHING
        self.was_asked_to_finish = True
        self._finish_deadline = time.monotonic() + self._limits.finish_s
        self._console.line(f"{name}: finishing this step, then saving a checkpoint; once more stops at once")
        for child_name, role in self._roles.items():
            if role == "orchestrator":
                self._children[child_name].signal(signal.SIGINT)


class _StatusPipe:
    """The reading end of the orchestrator's status lines (schema in base/status.py)."""

    def __init__(self, on_status) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._on_status = on_status
        self._partial = b""

    def open(self) -> None:
        """Begin to read; only the orchestrator holds the writing end from now on."""
        os.close(self.writer)
        self.writer = -1
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def close(self) -> None:
        """Read what is left, then stop."""
        if self.writer >= 0:
            os.close(self.writer)
        else:
            self._read()
            asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._reader)
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                try:
                    status = json.loads(line)
                except ValueError:
                    logger.warning("not a status line: %r", line[:200])
                    continue
                self._on_status(status)
