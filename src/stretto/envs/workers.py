"""Environments in processes of their own: started, watched, killed when they hang, started anew.

A `WorkerEnv` stands for an environment that lives in `num_workers` processes (worker.py); what the two say is
in worker_wire.py. Rollouts go to the worker with the fewest. States of a worker:

    STARTING -> READY -> ENDED     the process ended, was silent for hang_timeout_s, or did not end a rollout
                                   that was cancelled; its rollouts fail as EngineError, those of the other
                                   workers go on, and another process takes its place

A rollout waits for a READY worker. A place whose processes end MAX_BAD_STARTS times in a row before they are
READY is given up; with the last one every rollout fails, saying why.

The processes are started when the environment is built, and waited for: what is wrong with the environment is
said before training begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError, EngineError, EnvError, StrettoError
from stretto.envs.base import Environment, RolloutContext, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.envs.worker_wire import (
    BEAT_S,
    Answer,
    Ask,
    Beat,
    Cancel,
    Done,
    Failed,
    FromWorker,
    Open,
    Play,
    Prompt,
    Prompted,
    Ready,
    Refusal,
    Refused,
    Score,
    error_of,
    kind_of,
    packed,
    receive,
    receive_blocking,
)
from stretto.records.rollout import Task

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Longest start of a worker: imports and data sets of an environment."""
CANCEL_GRACE_S = 10.0
"""A worker that has not ended a cancelled rollout after so long hangs."""
MAX_BAD_STARTS = 3
_LONGEST_BACKOFF_S = 30.0
_STOP_GRACE_S = 5.0


def open_workers(
    env_id: str,
    args: dict[str, Any],
    name: str,
    *,
    num_workers: int,
    hang_timeout_s: float = 60.0,
    log_dir: Path | None = None,
) -> Environment:
    """The environment in num_workers processes, all of which are there; logs go to log_dir.

    It belongs to the event loop in which it is first used, and is to be closed there.

    Raises: ConfigError, EnvError of the worker that builds it; EnvError when it ends or takes too long.
    """
    opening = Open(env_id=env_id, args=args, name=name, hang_timeout_s=hang_timeout_s)
    packed(opening)  # arguments that cannot be sent are refused before anything is started
    pool = Pool(opening, num_workers, log_dir or Path(tempfile.mkdtemp(prefix="stretto-env-")))
    ready = pool.start()
    return (SingleTurnWorkerEnv if ready.is_single_turn else WorkerEnv)(name, pool, ready)


class WorkerEnv:
    """An environment whose episodes are played in worker processes.

    Its tasks are numbers here (`data` is split and index); the worker makes the environment's own from them.
    """

    def __init__(self, name: str, pool: Pool, ready: Ready) -> None:
        self.name = name
        self.limits = ready.limits
        self.pool = pool
        self._ready = ready
        self._asked: set[Split] = set()

    def tasks(self, split: Split) -> TaskSource:
        if split in self._ready.no_tasks:
            raise ConfigError(self._ready.no_tasks[split])
        self._asked.add(split)
        if self._ready.are_tasks_shared and len(self._asked) == 2:
            logger.warning("%s is evaluated on the tasks it is trained on: it holds none out", self.name)
        ready = self._ready
        make = lambda index: self._task(split, index)
        return TaskSource(make, ready.num_tasks[split], split in ready.ordered, ready.fingerprints.get(split))

    def _task(self, split: Split, index: int) -> Task:
        return Task(env=self.name, task_id=f"{split}-{index}", data={"split": split, "index": index})

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        ended = await self.pool.call(lambda number: Play(call=number, task=task), ctx)
        assert isinstance(ended, Done)
        return ended.result

    async def close(self) -> None:
        """Stop the processes."""
        await self.pool.close()


class SingleTurnWorkerEnv(WorkerEnv, SingleTurnEnv):
    """One prompt, one reply, one score, the first and the last made in worker processes."""

    async def prompt(self, task: Task) -> list[dict[str, Any]]:
        ended = await self.pool.call(lambda number: Prompt(call=number, task=task))
        assert isinstance(ended, Prompted)
        return ended.messages

    async def score(self, task: Task, text: str) -> RolloutResult:
        ended = await self.pool.call(lambda number: Score(call=number, task=task, text=text))
        assert isinstance(ended, Done)
        return ended.result


# -- processes --


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


@dataclass(eq=False)
class Call:
    """A rollout, prompt or score in a worker."""

    ctx: RolloutContext | None
    end: asyncio.Future[Done | Prompted]
    asks: set[asyncio.Task[None]] = field(default_factory=set)
    cancelled_at: float | None = None


@dataclass(eq=False)
class Worker:
    """One process, from start to end."""

    name: str
    child: process.Child
    wire: socket.socket
    alarm: int  # read end of the pipe of its watchdog
    hang_timeout_s: float
    state: State = State.STARTING
    calls: dict[int, Call] = field(default_factory=dict)
    num_ended: int = 0  # calls
    heard_at: float = field(default_factory=time.monotonic)
    writer: asyncio.StreamWriter | None = None

    def send(self, message: Any) -> None:
        assert self.writer is not None
        self.writer.write(packed(message))

    def why_silent(self) -> tuple[int | None, str]:
        """The call that blocks it, where its watchdog knows it, and what to say of it."""
        text, call = f"{self.name} was silent for {self.hang_timeout_s:g} s", None
        with contextlib.suppress(OSError, ValueError):
            if lines := os.read(self.alarm, 1 << 16).splitlines():
                alarm = json.loads(lines[-1])
                call = alarm["call"]
                text = f"{text}: its event loop is blocked at {alarm['place']}"
        return call, text

    def close(self) -> None:
        """Hang up, without waiting."""
        self.state = State.ENDED
        if self.writer is not None:
            self.writer.close()
        else:
            self.wire.close()
        if self.alarm >= 0:
            os.close(self.alarm)
            self.alarm = -1

    def kill(self) -> None:
        """End the process and what it has started, at once; for where nothing can be awaited."""
        self.close()
        self.child.signal_group(signal.SIGKILL)
        self.child.popen.wait()
        self.child.close()


class Pool:
    """The workers of one environment."""

    def __init__(self, opening: Open, num_workers: int, log_dir: Path) -> None:
        self._opening, self._log_dir = opening, log_dir
        self._places: list[Worker | None] = [None] * num_workers
        self._numbers = itertools.count()
        self._tending: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_changed = asyncio.Event()
        self._broken: str | None = None
        self.num_lost = 0  # processes that ended before close

    @property
    def workers(self) -> list[Worker]:
        """Those that have not ended."""
        return [worker for worker in self._places if worker and worker.state is not State.ENDED]

    def start(self) -> Ready:
        """Start all processes and wait until they are ready.

        Raises: StrettoError as a worker says; EnvError when one ends or is too late.
        """
        try:
            for place in range(len(self._places)):
                self._places[place] = self._start(place)
            first, *_ = [self._greeted(worker) for worker in self.workers]
            return first
        except BaseException:
            for worker in self.workers:
                worker.kill()
            raise

    def _greeted(self, worker: Worker) -> Ready:
        """Wait for the first word of a worker."""
        worker.wire.settimeout(START_TIMEOUT_S)
        try:
            message = receive_blocking(worker.wire, FromWorker)
            if isinstance(message, Refused):
                raise error_of(message.kind, message.text)
            if message is None:
                worker.child.popen.wait()
                raise EnvError(_died(worker))
            assert isinstance(message, Ready)
            worker.state = State.READY
            return message
        except TimeoutError as cause:
            raise EnvError(
                f"{worker.name} was not ready within {START_TIMEOUT_S:g} s; see {worker.child.log}"
            ) from cause

    def _start(self, place: int) -> Worker:
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        opening = self._opening
        name = f"env-{opening.name.replace('/', '_')}-{place}"
        code = "from stretto.envs.worker import main; main()"
        fds = (theirs.fileno(), write_end)
        argv = (sys.executable, "-c", code, *map(str, fds), name)
        try:
            child = process.start(
                name,
                argv,
                env={
                    **process.thread_env(1),
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, sys.path)
                    ),  # modules are found where we find them
                    "PYTHONHASHSEED": "0",  # generators that go through a set give every worker the same task
                },
                log=self._log_dir / f"{name}.log",
                pass_fds=fds,
            )
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        ours.sendall(packed(opening))
        return Worker(name, child, ours, read_end, opening.hang_timeout_s)

    # -- calls --

    async def call(
        self, message_of: Callable[[int], Play | Prompt | Score], ctx: RolloutContext | None = None
    ) -> Done | Prompted:
        """Run one call in the worker that has the fewest.

        Raises: what the environment raises; EngineError when the worker ends; EnvError when there is none.
        """
        self._attach()
        worker = await self._free_worker()
        number = next(self._numbers)
        worker.send(message_of(number))
        call = worker.calls[number] = Call(ctx, asyncio.get_running_loop().create_future())
        try:
            return await call.end
        except asyncio.CancelledError:
            if number in worker.calls:
                call.cancelled_at = time.monotonic()
                worker.send(Cancel(call=number))
            raise
        finally:
            for ask in call.asks:
                ask.cancel()

    async def _free_worker(self) -> Worker:
        while True:
            if ready := [each for each in self.workers if each.state is State.READY and each.writer]:
                return min(ready, key=lambda worker: len(worker.calls))
            if self._broken is not None:
                raise EnvError(self._broken)
            self._has_changed.clear()
            await self._has_changed.wait()

    def _attach(self) -> None:
        """Tend the workers from the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._tending = [loop.create_task(self._tend(place)) for place in range(len(self._places))]
        assert self._loop is loop, f"environment {self._opening.name} is used in two event loops"

    async def _tend(self, place: int) -> None:
        """One process after another in this place, until close."""
        num_bad_starts = num_idle_lives = 0
        while True:
            worker = self._places[place]
            assert worker is not None
            try:
                culprit, reason = await self._serve(worker)
            finally:
                was_ready = worker.state is State.READY
                worker.close()
            self.num_lost += 1
            self._fail_calls(worker, culprit, reason)
            worker.child.signal_group(signal.SIGKILL)
            await process.stop([worker.child], grace_s=_STOP_GRACE_S)
            num_bad_starts = 0 if was_ready else num_bad_starts + 1
            num_idle_lives = 0 if worker.num_ended else num_idle_lives + 1
            if num_bad_starts >= MAX_BAD_STARTS:
                self._give_up(place, f"{reason} ({num_bad_starts} times in a row before it was ready)")
                return
            logger.warning("%s: it is started anew", reason)
            await asyncio.sleep(min(0.25 * (2**num_idle_lives - 1), _LONGEST_BACKOFF_S))
            try:
                self._places[place] = self._start(place)
            except (OSError, StrettoError) as error:
                self._give_up(place, f"{worker.name} cannot be started: {error}")
                return

    def _give_up(self, place: int, reason: str) -> None:
        self._places[place] = None
        left = sum(worker is not None for worker in self._places)
        logger.error("%s: given up; workers left: %d", reason, left)
        if not left:
            self._broken = reason
            self._has_changed.set()

    async def _serve(self, worker: Worker) -> tuple[int | None, str]:
        """Hear a worker until its end: the call that is to blame, if one is, and the reason."""
        worker.wire.setblocking(False)
        reader, worker.writer = await asyncio.open_connection(sock=worker.wire)
        worker.heard_at = time.monotonic()
        self._has_changed.set()
        hearing = asyncio.create_task(self._hear(worker, reader))
        watching = asyncio.create_task(_watch(worker))
        try:
            done, _ = await asyncio.wait({hearing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if hearing not in done:
                return watching.result()
            try:
                return None, hearing.result()
            except StrettoError as error:
                return None, f"{worker.name} said what cannot be read: {error}"
        finally:
            hearing.cancel()
            watching.cancel()
            await asyncio.gather(hearing, watching, return_exceptions=True)

    async def _hear(self, worker: Worker, reader: asyncio.StreamReader) -> str:
        """Take what a worker says; returns why it ends."""
        while (message := await receive(reader, FromWorker)) is not None:
            worker.heard_at = time.monotonic()
            match message:
                case Beat():
                    pass
                case Ready():
                    worker.state = State.READY
                    self._has_changed.set()
                case Refused(text=text):
                    return f"{worker.name}: {text}"
                case Ask(call=number):
                    if (call := worker.calls.get(number)) and call.ctx is not None and not call.end.done():
                        task = asyncio.create_task(_answer(worker, call.ctx, message))
                        call.asks.add(task)
                        task.add_done_callback(call.asks.discard)
                case _:
                    worker.num_ended += 1
                    call = worker.calls.pop(message.call, None)
                    if call is None or call.end.done():
                        continue
                    if isinstance(message, Failed):
                        call.end.set_exception(error_of(message.kind, message.text))
                    else:
                        call.end.set_result(message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S):
                await worker.child.wait()
        return _died(worker)

    def _fail_calls(self, worker: Worker, culprit: int | None, reason: str) -> None:
        for number, call in worker.calls.items():
            if call.end.done():
                continue
            if number == culprit:
                call.end.set_exception(EnvError(f"environment {self._opening.name}: {reason}"))
            else:
                call.end.set_exception(EngineError(f"lost with its worker: {reason}"))
        worker.calls.clear()

    async def close(self) -> None:
        """Hang up, wait for the workers to end, and kill those that do not."""
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        workers = [worker for worker in self._places if worker is not None]
        for worker in workers:
            if worker.state is not State.ENDED:
                worker.close()
            self._fail_calls(worker, None, "the environment is closed")
        if endings := [
            asyncio.create_task(worker.child.wait()) for worker in workers if worker.child.pidfd >= 0
        ]:
            await asyncio.wait(endings, timeout=_STOP_GRACE_S)
            for ending in endings:
                ending.cancel()
        await process.stop([w.child for w in workers if w.child.pidfd >= 0], grace_s=0.5)
        self._places = [None] * len(self._places)
        self._broken = f"environment {self._opening.name} is closed"
        self._has_changed.set()


async def _answer(worker: Worker, ctx: RolloutContext, ask: Ask) -> None:
    """Take the turn that a worker asks for."""
    try:
        player = ctx if ask.agent is None else ctx.agent(ask.agent, is_trained=ask.is_trained)
        if ask.messages is not None:
            reply = await player.chat(ask.messages, ask.tools, **ask.sampling)
        else:
            assert ask.prompt_ids is not None
            reply = await player.generate(ask.prompt_ids, ask.tools, **ask.sampling)
        answer: Answer | Refusal = Answer(ask=ask.ask, reply=reply)
    except StrettoError as error:
        answer = Refusal(ask=ask.ask, kind=kind_of(error), text=str(error))
    except Exception as cause:  # the boundary of a rollout
        answer = Refusal(ask=ask.ask, kind="EngineError", text=f"{type(cause).__name__}: {cause}")
    if worker.state is not State.ENDED:
        worker.send(answer)


async def _watch(worker: Worker) -> tuple[int | None, str]:
    """Wait until a worker hangs or is dead: the call that is to blame, if one is, and the reason."""
    tick_s = min(BEAT_S, worker.hang_timeout_s / 8)
    started_at = looked_at = time.monotonic()
    while True:
        await asyncio.sleep(tick_s)
        now = time.monotonic()
        if now - looked_at > tick_s + worker.hang_timeout_s / 2:
            worker.heard_at = now  # we did not listen
        looked_at = now
        if worker.child.returncode is not None:
            return None, _died(worker)
        if worker.state is State.STARTING:
            if now - started_at > START_TIMEOUT_S:
                return None, f"{worker.name} was not ready within {START_TIMEOUT_S:g} s"
        elif now - worker.heard_at > worker.hang_timeout_s:
            return worker.why_silent()
        for number, call in worker.calls.items():
            if call.cancelled_at is not None and now - call.cancelled_at > CANCEL_GRACE_S:
                text = f"{worker.name} did not end a cancelled rollout within {CANCEL_GRACE_S:g} s"
                return number, text


def _died(worker: Worker) -> str:
    """How a process ended, with its last lines."""
    returncode = worker.child.returncode
    how = "hung up" if returncode is None else f"ended ({process.describe_exit(returncode)})"
    lines = [line for line in worker.child.tail(8) if line.strip()]
    last = "; its last lines:\n  " + "\n  ".join(lines) if lines else ""
    return f"{worker.name} {how}{last}"
