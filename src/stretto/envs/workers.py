"""Environments in processes of their own: started, watched, killed when they hang, started anew.

A `WorkerEnv` stands for an environment that lives in `num_workers` processes (worker.py); what the two say is
in worker_wire.py, and one process is in worker_handle.py. Rollouts go to the worker with the fewest. States
of a worker:

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
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError, EngineError, EnvError, StrettoError
from stretto.envs import worker_handle
from stretto.envs.base import Environment, RolloutContext, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.envs.worker_handle import Call, State, Worker
from stretto.envs.worker_wire import (
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
    Refused,
    Score,
    error_of,
    packed,
    receive,
    receive_blocking,
)
from stretto.records.rollout import Task

logger = logging.getLogger(__name__)

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
        worker.wire.settimeout(worker_handle.START_TIMEOUT_S)
        try:
            message = receive_blocking(worker.wire, FromWorker)
            if isinstance(message, Refused):
                raise error_of(message.kind, message.text)
            if message is None:
                worker.child.popen.wait()
                raise EnvError(worker_handle.died(worker))
            assert isinstance(message, Ready)
            worker.state = State.READY
            return message
        except TimeoutError as cause:
            raise EnvError(
                f"{worker.name} was not ready within {worker_handle.START_TIMEOUT_S:g} s; see {worker.child.log}"
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
        # Modules are found where we find them; and generators that go through a set give every worker the same task.
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        try:
            child = process.start(
                name,
                argv,
                env=process.thread_env(1) | env,
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
        with contextlib.suppress(ConnectionError):  # one that has ended already is noticed when it is heard
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
        watching = asyncio.create_task(worker_handle.watch(worker))
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
                        task = asyncio.create_task(worker_handle.answer(worker, call.ctx, message))
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
        return worker_handle.died(worker)

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
