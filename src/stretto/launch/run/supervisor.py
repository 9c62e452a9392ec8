"""Starts the processes of a command on this machine, watches them, and ends them together.

Used by `rl` (rl.py), `inference` with several processes (serve.py), `sft` with several ranks and `serve`
(service.py). One process may lead: the orchestrator of `rl`, rank 0 of `sft`. At the first signal it is asked to
finish, and it ends first. The others begin when an orchestrator reports that it has checked everything: those that
import for long are started beside it, and wait for that.

States: RUNNING -> FINISHING (after the first signal: the lead finishes its step and a checkpoint is saved) -> ENDED;
from both, STOPPING when a process fails, a deadline passes, or a second signal comes. The children are in process
groups of their own, so Ctrl-C reaches only the launcher; the kernel kills them when it dies. SIGUSR2, which a job sends
to all nodes, asks only the lead to finish.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType, MappingProxyType
from urllib.parse import urlsplit

from stretto.base import process
from stretto.base.errors import ENDED_FIRST
from stretto.base.paths import RunDir
from stretto.base.process import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST, Child, Restarts
from stretto.base.status import DEVICES_FREE, GO_FD_VAR, STATUS_FD_VAR, SUPERVISED_VAR, was_asked_to_finish
from stretto.base.watch import EXIT_STALLED
from stretto.launch.plan.processes import ProcessSpec
from stretto.launch.run.console import Console

logger = logging.getLogger(__name__)

STALL_SLACK_S = 60.0  # the processes' own watchdogs fire first and say more
RESTART_GRACE_S = 2.0
LAUNCHERS_TURN_S = 1.0  # for a signal to all processes of a job to reach this one, after one that it has ended
LAST_MESSAGES_S = 3.0  # for other processes to log why they end when one has failed
WEDGED_AFTER_S = 60.0  # after its start; before that, an engine may be loading its model
SERVERS = ("inference", "teacher", "router", "registrar", "kv_store", "tenants", "hub")
"""Roles that never end by themselves; those that begin with MODELS do not either."""
MODELS = "model_"
FINISH = signal.SIGUSR2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, FINISH)


class RunState(StrEnum):
    RUNNING = "running"
    FINISHING = "finishing"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class Timeouts:
    """Longest waits of the launcher, seconds; None: for ever."""

    stall_s: float | None = None
    """Without a status line or a log line from any process."""
    finish_s: float | None = None
    """Between the first Ctrl-C and the lead's end."""
    end_s: float = 120.0
    """Between the lead's end and that of the others."""
    grace_s: float = 6.0
    """Between SIGTERM and SIGKILL; with what comes after it, well under 10 s."""


def serve(
    specs: Sequence[ProcessSpec], run: RunDir, title: str, stall_s: float, *, grace_s: float = Timeouts.grace_s
) -> int:
    """Run processes without an orchestrator; if all are servers, until a signal comes. grace_s: see Timeouts."""
    console = Console(sys.stdout, max_steps=None)
    names = ", ".join(spec.name for spec in specs)
    console.line(f"{title}: {names}\n  logs     {run.logs}")
    limit = stall_s + STALL_SLACK_S
    supervisor = Supervisor(specs, run, console, timeouts=Timeouts(limit, limit, grace_s=grace_s))
    try:
        return asyncio.run(supervisor.run())
    finally:
        console.close()


def last_error(child: Child) -> list[str]:
    """The last `error: ` line of a process's log and what follows it; [] if there is none."""
    lines = child.tail(40)
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return lines[starts[-1] :] if starts else []


def is_reason(line: str) -> bool:
    """Whether this last line of a log says why the process ended."""
    return line.startswith("error: ") or re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line) is not None


def is_server(spec: ProcessSpec) -> bool:
    """Whether this process never ends by itself."""
    return spec.role in SERVERS or spec.role.startswith(MODELS)


class Supervisor:
    """Runs processes until the lead and all that are not servers have ended, or one fails."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run: RunDir,
        console: Console | None,
        *,
        timeouts: Timeouts,
        pass_fds: Sequence[int] = (),
        likely_causes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """console: None if the first process leads and writes to the terminal itself.

        likely_causes: by role, what may have ended a process that logged no reason.
        """
        self.state = RunState.RUNNING
        self.was_asked_to_finish = False
        self.was_stopped_before_begin = False
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run
        self._console = console
        self._timeouts = timeouts
        self._pass_fds = tuple(pass_fds)
        self._likely_causes = likely_causes
        self._children: dict[str, Child] = {}
        leads = [spec.name for spec in specs if console is None or spec.role == "orchestrator"]
        # Without a lead, processes of another node end these trainer ranks; servers go on until a signal comes.
        self._lead = leads[0] if leads else None
        self._are_servers = all(map(is_server, specs))
        self._restarts = {spec.name: Restarts(spec.max_restarts) for spec in specs}
        self._status = StatusPipe(self._on_status)
        self._stop_now = asyncio.Event()
        self._is_terminated = asyncio.Event()
        self._has_checked = asyncio.Event()
        self._go = GoPipe()
        self._are_devices_free = False
        if console is None or self._lead is None:
            self._let_go()
        self.has_begun = console is None
        """There is work to finish: a status line of the orchestrator has reported it."""
        self._must_finish = False
        self._last_status_at = self._last_line_at = time.monotonic()
        self._log_dates: list[int] = []
        self._finish_deadline: float | None = None
        self._end_deadline: float | None = None

    async def run(self) -> int:
        """Start, watch, stop; the exit status."""
        with _handle_signals(self._on_signal):
            try:
                self._status.open()
                if self._console is not None and was_asked_to_finish():  # else the lead checks it
                    self._on_signal(FINISH)
                return await self._watch()
            finally:
                self.state = RunState.STOPPING
                await self._stop()
                self.state = RunState.ENDED

    def _start(self, spec: ProcessSpec) -> Child:
        env, fds = spec.env | self._status.env(), list(self._pass_fds)
        if spec.imports_early and not self._has_checked.is_set():
            env, fds = env | self._go.env(), [*fds, *self._go.fds()]
        if self._status.writer >= 0:
            fds.append(self._status.writer)
        is_shown = self._console is None and spec.name == self._lead
        path = self._run_dir.log(spec.name)
        child = process.start(spec.name, spec.argv, env=env, log=path, pass_fds=fds, is_shown=is_shown)
        self._children[spec.name] = child
        return child

    def _start_due(self, running: dict[asyncio.Task, Child]) -> None:
        """Start the lead, and what may import meanwhile; the others once the lead has checked everything; last, those
        that wait for devices of engines."""
        for spec in self._specs.values():
            is_checked = self._has_checked.is_set() and (self._are_devices_free or not spec.waits_for_devices)
            is_due = is_checked or spec.name == self._lead or spec.imports_early
            if is_due and spec.name not in self._children:
                child = self._start(spec)
                running[asyncio.create_task(child.wait())] = child
        if len(self._children) == len(self._specs):
            self._status.close_writer()

    async def _watch(self) -> int:
        running: dict[asyncio.Task, Child] = {}
        stop_now = asyncio.create_task(self._stop_now.wait())
        checked = asyncio.create_task(self._has_checked.wait())
        try:
            while True:
                self._start_due(running)
                tasks = {*running, stop_now} if checked.done() else {*running, stop_now, checked}
                done, _ = await asyncio.wait(tasks, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                if self._console is not None:
                    self._console.tick()
                ended = [running.pop(task) for task in done if task in running]
                # If several ended together, one killed by a signal is the likelier cause.
                for child in sorted(ended, key=lambda child: child.returncode or 0):
                    if await self._is_whole_run_ended(child):
                        return self._stopped_by_signal()
                    if self._restarts[child.name].left(child.age_s) > 0:
                        restarted = await self._restart(child)
                        running[asyncio.create_task(restarted.wait())] = restarted
                        continue
                    if child.returncode != 0 or is_server(self._specs[child.name]):
                        return await self._failed(await self._cause(child, running), running)
                    logger.info("%s ended", child.name)
                working = [c.name for c in running.values() if not is_server(self._specs[c.name])]
                if not working and not self._are_servers:
                    return 0
                if stop_now.done():
                    return self._stopped_by_signal()
                if self._lead is not None and (status := self._overdue(working)):
                    return status
        finally:
            for task in (*running, stop_now, checked):
                task.cancel()

    async def _restart(self, child: Child) -> Child:
        """Start a server again that has ended; its clients use another one or wait."""
        returncode = child.returncode
        assert returncode is not None
        restarts = self._restarts[child.name]
        restarts.use(child.age_s)
        await child.end_leftovers(time.monotonic() + RESTART_GRACE_S)
        child.close()
        how, left = process.describe_exit(returncode), restarts.left(0.0)
        if returncode > 0 and (reason := last_error(child)):
            how += f": {reason[0].removeprefix('error: ')}"
        restarted = self._start(self._specs[child.name])
        logger.warning("%s (pid %d) ended: %s; started anew, pid=%d", child.name, child.pid, how, restarted.pid)
        self._show(
            f"{child.name} ended ({how}) and was started anew; {left} more time{'s' * (left != 1)} allowed"
            + " (inference.max_restarts)" * (self._specs[child.name].role == "inference")
        )
        return restarted

    def _kill_wedged(self, url: str) -> None:
        """Kill an engine that no longer answers, if it runs and may be restarted."""
        port = urlsplit(url).port
        for spec in self._specs.values():
            child = self._children.get(spec.name)
            is_it = spec.role == "inference" and port in spec.ports.values()
            if child is None or not is_it:
                continue
            is_running = child.returncode is None and child.age_s > WEDGED_AFTER_S
            if is_running and self._restarts[spec.name].left(child.age_s):
                logger.warning("%s (pid %d) does not answer: killed", child.name, child.pid)
                child.signal_group(signal.SIGKILL)

    # -- what ends a run --

    async def _cause(self, child: Child, running: Mapping[asyncio.Task, Child]) -> Child:
        """The process whose end made this one fail: the lead, or the process that its message names; else itself."""
        lead = self._children.get(self._lead or "")
        line = next((line for line in last_error(child) if ENDED_FIRST in line), None)
        if line is None:
            return child
        named = re.search(rf"(\w+) {ENDED_FIRST}", line)
        lead = self._children.get(named[1], lead) if named else lead
        if lead is None:
            return child
        if ends := [task for task, other in running.items() if other is lead]:
            await asyncio.wait(ends, timeout=LAST_MESSAGES_S)
        return lead if lead.returncode else child

    async def _failed(self, child: Child, running: Mapping[asyncio.Task, Child]) -> int:
        """Show which process failed, and how; the exit status."""
        returncode = child.returncode
        assert returncode is not None
        if await self._is_whole_run_ended(child):
            return self._stopped_by_signal()
        if self._console is None and self._lead is not None:
            if running:
                await asyncio.wait(running, timeout=LAST_MESSAGES_S)
            lead = self._children[self._lead].returncode
            if lead == EXIT_CONFIG or (lead and child.name == self._lead and lead > 0):
                return lead  # it wrote its error to the terminal
        self._status.read()
        reason = [] if self.has_begun or returncode not in (EXIT_FAILED, EXIT_CONFIG) else last_error(child)
        if reason:  # nothing has been trained, and the error is known: nothing else needs to be shown
            where = f"  (from {child.name}; its log is {child.log})"
            self._show("\n".join([*reason, where]), is_failure=True)
            logger.error("%s ended: %s", child.name, reason[0])
            return returncode
        how = process.describe_exit(returncode)
        if returncode == EXIT_STALLED:
            how += f" (stalled: stacks and queue depths in {self._run_dir.dumps})"
        elif returncode == 0:
            how += " (it was not asked to end)"
        elif returncode == -signal.SIGKILL:
            how += ", by hand or because memory ran out (`dmesg` says)"
        is_asked = returncode in (-signal.SIGTERM, -signal.SIGINT)
        if is_asked:
            how += ": it was asked to end from outside the run, as `kill`, `scancel` or a time limit does"
        lines = [f"FAILED: {child.name} (pid {child.pid}) ended after {child.age_s:.0f}s: {how}"]
        tail = last_error(child) or child.tail()  # lines before a known reason would hide it
        lines.append(f"  the end of {child.log}:" if tail else f"  {child.log}: it wrote nothing")
        lines += [f"    {line}" for line in tail]
        cause = self._likely_causes.get(self._specs[child.name].role)
        if cause and not is_asked and not any(map(is_reason, tail[-1:])):
            lines.append(f"  {cause}")
        logger.error("%s ended: %s", child.name, how)
        self._show("\n".join(lines), is_failure=True)
        return EXIT_LOST if returncode == EXIT_LOST else EXIT_FAILED

    async def _is_whole_run_ended(self, child: Child) -> bool:
        """Whether SIGTERM came to this process and to the launcher, as when a job is cancelled.

        A scheduler and systemd send it to all processes of a job, in any order; engines then end with 0.
        """
        is_by_signal = child.returncode == -signal.SIGTERM
        if not is_by_signal and not (child.returncode == 0 and is_server(self._specs[child.name])):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(LAUNCHERS_TURN_S):
                await self._is_terminated.wait()
        return self._is_terminated.is_set()

    def _stopped_by_signal(self) -> int:
        if self._lead is None:
            return 0
        if self.has_begun:
            self._show("stopped at once; the last complete checkpoint and finished rollouts are kept")
            return EXIT_INTERRUPTED
        self.was_stopped_before_begin = True
        self._show("stopped before the first step: there was nothing to save")
        return 0

    def _overdue(self, working: list[str]) -> int | None:
        """If a deadline has passed, show which processes are late; the exit status, None if none has passed."""
        now, timeouts = time.monotonic(), self._timeouts
        names = ", ".join(working)
        if self._lead not in working and self._end_deadline is None:
            self._end_deadline = now + timeouts.end_s
        if self._end_deadline is not None and now > self._end_deadline:
            what = f"{self._lead} ended {timeouts.end_s:g}s ago and {names} did not"
        elif self._finish_deadline is not None and now > self._finish_deadline:
            what = f"waited {timeouts.finish_s:g}s for {names} to finish the step"
        elif timeouts.stall_s is not None and now - self._last_output_at() > timeouts.stall_s:
            what = f"nothing moved for {timeouts.stall_s:g}s: no status and no log line from {names}"
        else:
            return None
        for child in self._children.values():
            child.signal(signal.SIGUSR1)  # log.setup made it print all stacks
        logger.error("%s", what)
        self._show(f"FAILED: {what}; stacks of all processes are in {self._run_dir.logs}", is_failure=True)
        return EXIT_FAILED if self._console is None else EXIT_STALLED

    def _last_output_at(self) -> float:
        """When the last status or log line of any process came, as monotonic time.

        Dates of logs are compared with each other alone: they are of another clock, which may be set.
        """
        dates = [child.log.stat().st_mtime_ns for child in self._children.values() if child.log.exists()]
        if dates != self._log_dates:
            self._log_dates, self._last_line_at = dates, time.monotonic()
        return max(self._last_status_at, self._last_line_at)

    async def _stop(self) -> None:
        if not self._has_checked.is_set():
            for child in self._children.values():
                if child.name != self._lead:  # it has only imported
                    child.signal_group(signal.SIGKILL)
                    child.popen.wait()
        running = [child.name for child in self._children.values() if child.returncode is None]
        started = time.monotonic()
        await process.stop(self._children.values(), grace_s=self._timeouts.grace_s)
        self._status.close()
        self._go.close()
        if running and set(running) != {"inference"}:
            self._show(f"stopped {', '.join(running)} in {time.monotonic() - started:.1f}s")

    # -- status lines and signals --

    def _on_status(self, status: dict) -> None:
        if status.get("kind") not in ("note", "warning", "progress"):
            self._let_go()
            self.has_begun |= not status.get("is_early")
        self._last_status_at = time.monotonic()
        self._are_devices_free |= status.get("kind") == DEVICES_FREE
        if self._must_finish and self.has_begun:
            self._must_finish = False
            self._on_signal(FINISH)
        if status.get("kind") == "engine":
            self._show(f"engine {status['url']} is {status['state']}: {status['reason']}")
            self._kill_wedged(status["url"])
        elif self._console is not None:
            self._console.show(status)

    def _let_go(self) -> None:
        """Everything is checked: processes that wait for that go on, the others start."""
        if self._has_checked.is_set():
            return
        self._has_checked.set()
        self._go.close()
        for child in self._children.values():
            if child.name != self._lead:  # until now it has waited
                child.started_at = time.monotonic()

    def _on_signal(self, number: signal.Signals) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        logger.info("%s while %s", name, self.state)
        if number == signal.SIGTERM:
            self._is_terminated.set()
        if number == FINISH and (self._lead is None or self.state is not RunState.RUNNING):
            return
        if number == FINISH and not self.has_begun:
            self._must_finish = True  # after the first step: an early request should not waste the start
            return
        can_finish = self.state is RunState.RUNNING and self.has_begun
        if self._lead is not None and (can_finish or self._console is None):
            # A lead that has the terminal does not report whether it can finish; until it can, it ignores FINISH.
            is_request = number == FINISH and self._console is None
            self._children[self._lead].signal(FINISH if is_request else signal.SIGINT)
        if not can_finish:
            self._stop_now.set()
            return
        self.state = RunState.FINISHING
        self.was_asked_to_finish = True
        if self._timeouts.finish_s is not None:
            self._finish_deadline = time.monotonic() + self._timeouts.finish_s
        once_more = "" if number == FINISH else "; once more stops at once"
        self._show(f"{name}: finishing this step, then saving a checkpoint{once_more}")

    def _show(self, text: str, *, is_failure: bool = False) -> None:
        """Write a text to the console; without a console only failures, since the lead has the terminal."""
        if self._console is not None:
            self._console.line(text)
        elif is_failure:
            sys.stderr.write(text + "\n")


@contextmanager
def _handle_signals(on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside, the event loop handles stop signals. Afterwards they are ignored: the exit status is decided."""
    loop = asyncio.get_running_loop()

    # Not loop.add_signal_handler: removing one sets the default action for a moment, and that ends this process.
    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(on_signal, signal.Signals(number))

    for number in STOP_SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class GoPipe:
    """The launcher's ends of the pipe whose end tells processes that all is checked (base/status.py)."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe()

    def env(self) -> dict[str, str]:
        """The environment variable of a process that waits; it needs the file descriptors `fds`, too."""
        return {GO_FD_VAR: str(self._ends[0])}

    def fds(self) -> tuple[int, ...]:
        """What a process that waits is given; nothing when all is checked."""
        return self._ends[:1]

    def close(self) -> None:
        """Let those that wait go on."""
        for fd in self._ends:
            os.close(fd)
        self._ends = ()


class StatusPipe:
    """The reading end of status lines of processes (schema in base/status.py)."""

    def __init__(self, on_status: Callable[[dict], None]) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._on_status = on_status
        self._partial = b""

    def open(self) -> None:
        """Begin to read."""
        asyncio.get_running_loop().add_reader(self._reader, self.read)

    def env(self) -> dict[str, str]:
        """Environment variables of a process that writes to the pipe; it needs the file descriptor `writer`, too."""
        return {SUPERVISED_VAR: "1"} | ({} if self.writer < 0 else {STATUS_FD_VAR: str(self.writer)})

    def close_writer(self) -> None:
        """Leave the writing end to the processes: the pipe ends with the last of them."""
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        """Read the rest, then stop."""
        self.close_writer()
        self.read()
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)

    def read(self) -> None:
        """Read what has been written so far, and call on_status for each line."""
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
