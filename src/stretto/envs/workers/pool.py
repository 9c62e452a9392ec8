"""Environments in worker processes, which are watched, killed if they hang, and replaced.

A `WorkerEnv` stands for an environment that lives in `num_workers` processes (workers/child.py). workers/wire.py has
the messages, workers/handle.py one process. A rollout goes to the worker that runs the fewest. States of a worker:

    STARTING -> READY -> ENDED         the process ended, sent nothing for hang_timeout_s, used too much memory, or did
                                       not end a cancelled rollout; its rollouts fail as EngineError, those of the
                                       other workers go on, and a new process takes its place
                READY -> DRAINING      its memory has grown, or it has reached its number of calls: it gets no more, and
                                       is ENDED with its last one; a new process takes its place

A rollout waits for a READY worker. A worker is given up if its processes end MAX_BAD_STARTS times in a row before
they are READY; when the last one is given up, every rollout fails with the reason.

Building the environment starts the processes and waits for them, so that errors of the environment end the start of
the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stretto.base import keeper, process
from stretto.base.errors import ConfigError, EngineError, EnvError, StrettoError
from stretto.base.secret import without_secret
from stretto.config.sections.distill import MODEL_KEY_VAR, TEACHER_KEY_VAR
from stretto.config.sections.inference import KEY_VAR
from stretto.envs.base import Environment, RolloutContext, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.envs.models import NO_MODELS, ChatModel
from stretto.envs.workers import handle
from stretto.envs.workers.handle import NO_WORKER_LIMITS, Call, WorkerHandle, WorkerLimits, WorkerState
from stretto.envs.workers.wire import (
    CallFailed,
    CancelCall,
    FromWorker,
    Heartbeat,
    ModelRequest,
    Open,
    OpenFailed,
    Ready,
    StartCall,
    TurnRequest,
    error_from,
    packed,
    receive,
    receive_blocking,
    task_at,
)
from stretto.records.outcomes import Reason
from stretto.records.rollout import Task

logger = logging.getLogger(__name__)

MAX_BAD_STARTS = 3
_LONGEST_BACKOFF_S = 30.0
_KEY_VARS = (KEY_VAR, TEACHER_KEY_VAR, MODEL_KEY_VAR)
"""API keys of the engines, which workers do not get: only the orchestrator sends requests to engines."""
_STOP_GRACE_S = 5.0


def open_workers(
    env_id: str,
    args: dict[str, Any],
    name: str,
    *,
    num_workers: int,
    hang_timeout_s: float = 60.0,
    worker_limits: WorkerLimits = NO_WORKER_LIMITS,
    log_dir: Path | None = None,
    models: Mapping[str, ChatModel] = NO_MODELS,
    directory: str | None = None,
) -> Environment:
    """The environment in num_workers processes, all of them ready.

    Logs go to log_dir; without it they are deleted when the environment is closed. directory: `RunInfo.directory`.

    The environment belongs to the event loop that first uses it, and must be closed there.

    Raises: ConfigError, EnvError if the environment cannot be built; EnvError if a worker ends or takes too long.
    """
    opening = Open(
        env_id=env_id, args=args, name=name, hang_timeout_s=hang_timeout_s, models=tuple(models), directory=directory
    )
    packed(opening)  # arguments that cannot be sent are refused before a process is started
    pool = Pool(opening, num_workers, log_dir, worker_limits, models)
    ready = pool.start()
    return (SingleTurnWorkerEnv if ready.is_single_turn else WorkerEnv)(name, pool, ready)


class WorkerEnv:
    """An environment whose episodes are played in worker processes.

    Its tasks hold split and index only; the worker makes the environment's own task from them.
    """

    def __init__(self, name: str, pool: Pool, ready: Ready) -> None:
        self.name = name
        self.limits = ready.limits
        self.pool = pool
        self._ready = ready
        self._used_splits: set[Split] = set()

    def tasks(self, split: Split) -> TaskSource:
        if split in self._ready.no_tasks:
            raise ConfigError(self._ready.no_tasks[split])
        self._used_splits.add(split)
        if self._ready.are_tasks_shared and len(self._used_splits) == 2:
            logger.warning("%s is evaluated on the tasks it is trained on: no tasks are held out", self.name)
        ready = self._ready
        make = lambda index: self._task(split, index)
        return TaskSource(make, ready.num_tasks[split], split in ready.ordered, ready.fingerprints.get(split))

    def _task(self, split: Split, index: int) -> Task:
        return task_at(self.name, split, index)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        return (await self.pool.call(ctx, method="rollout", task=task, episode=ctx.episode)).result

    async def close(self) -> None:
        """Stop the processes."""
        await self.pool.close()


class SingleTurnWorkerEnv(WorkerEnv, SingleTurnEnv):
    """A single-turn environment whose prompts and scores are made in worker processes."""

    async def prompt(self, task: Task) -> list[dict[str, Any]]:
        return (await self.pool.call(method="prompt", task=task)).messages

    async def score(self, task: Task, text: str) -> RolloutResult:
        return (await self.pool.call(method="score", task=task, text=text)).result


class Pool:
    """The workers of one environment."""

    def __init__(
        self,
        opening: Open,
        num_workers: int,
        log_dir: Path | None,
        worker_limits: WorkerLimits = NO_WORKER_LIMITS,
        models: Mapping[str, ChatModel] = NO_MODELS,
    ) -> None:
        self._opening, self._worker_limits, self._models = opening, worker_limits, models
        self._log_dir = log_dir or Path(tempfile.mkdtemp(prefix="stretto-env-", dir=keeper.start().directory))
        self._remove_logs = weakref.finalize(self, _remove, None if log_dir else self._log_dir)
        self._workers: list[WorkerHandle | None] = [None] * num_workers
        self._numbers = itertools.count()
        self._watching: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_changed = asyncio.Event()
        self._failure: str | None = None  # why no worker will ever be ready
        self.num_lost = 0  # processes that ended before close
        self.num_drained = 0

    @property
    def workers(self) -> list[WorkerHandle]:
        """Workers that have not ended."""
        return [worker for worker in self._workers if worker and worker.state is not WorkerState.ENDED]

    def start(self) -> Ready:
        """Start all processes and wait until they are ready.

        Raises: StrettoError that a worker reports; EnvError if one ends or takes too long.
        """
        try:
            for number in range(len(self._workers)):
                self._workers[number] = self._start(number)
            first, *_ = [self._wait_ready(worker) for worker in self.workers]
            return first
        except BaseException:
            for worker in self.workers:
                worker.kill()
            self._remove_logs()
            raise

    def _wait_ready(self, worker: WorkerHandle) -> Ready:
        """Wait for the first message of a worker."""
        worker.wire.settimeout(handle.START_TIMEOUT_S)
        try:
            message = receive_blocking(worker.wire, FromWorker)
            if isinstance(message, OpenFailed):
                raise error_from(message.kind, message.text)
            if message is None:
                worker.child.popen.wait()
                raise EnvError(handle.describe_end(worker))
            assert isinstance(message, Ready)
            worker.state = WorkerState.READY
            return message
        except TimeoutError as cause:
            raise EnvError(
                f"{worker.name} was not ready within {handle.START_TIMEOUT_S:g} s; see {worker.child.log}"
            ) from cause

    def _start(self, number: int) -> WorkerHandle:
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        opening = self._opening
        name = f"env-{opening.name.replace('/', '_')}-{number}"
        code = "from stretto.envs.workers.child import main; main()"
        fds = (theirs.fileno(), write_end)
        argv = (sys.executable, "-c", code, *map(str, fds), name)
        # The same module path as here. A fixed hash seed: task generators that iterate over a set agree in all workers.
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        try:
            child = process.start(
                name,
                argv,
                env=process.thread_env(1) | env | without_secret() | dict.fromkeys(_KEY_VARS, ""),
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
        # If the process has ended already, that is noticed when its socket is read.
        with contextlib.suppress(ConnectionError):
            ours.sendall(packed(opening))
        return WorkerHandle(name, child, ours, read_end, opening.hang_timeout_s, self._worker_limits)

    # -- calls --

    async def call(self, ctx: RolloutContext | None = None, **start: Any) -> Any:
        """Run one call in the READY worker that runs the fewest; returns its CallResult or PromptResult.

        ctx: the policy, for a call that requests turns. start: the fields of `StartCall` but its number.

        Raises: what the environment raises; EngineError if the worker ends; EnvError if there is no worker any more.
        """
        self._start_watching()
        worker = await self._least_busy_worker()
        number = next(self._numbers)
        worker.send(StartCall(call=number, **start))
        call = worker.calls[number] = Call(ctx, asyncio.get_running_loop().create_future())
        try:
            return await call.result
        except asyncio.CancelledError:
            if number in worker.calls:
                call.cancelled_at = time.monotonic()
                worker.send(CancelCall(call=number))
            raise
        finally:
            for turn in call.turns:
                turn.cancel()

    async def _least_busy_worker(self) -> WorkerHandle:
        while True:
            if ready := [each for each in self.workers if each.state is WorkerState.READY and each.writer]:
                return min(ready, key=lambda worker: len(worker.calls))
            if self._failure is not None:
                raise EnvError(self._failure, reason=Reason.WORKER_LOST)
            self._has_changed.clear()
            await self._has_changed.wait()

    def _start_watching(self) -> None:
        """Watch the workers from the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._watching = [loop.create_task(self._keep(number)) for number in range(len(self._workers))]
            for task in self._watching:
                task.add_done_callback(self._end_calls_of_broken_watch)
        assert self._loop is loop, f"environment {self._opening.name} is used in two event loops"

    def _end_calls_of_broken_watch(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for workers that are watched no more."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the workers of %s are watched no more", self._opening.name, exc_info=error)
        self._failure = f"{self._opening.name}: its workers are watched no more, by a fault of stretto: {error!r}"
        for worker in filter(None, self._workers):
            self._fail_calls(worker, None, self._failure)
        self._has_changed.set()

    async def _keep(self, number: int) -> None:
        """Watch the worker of this number and replace it when it ends, until `close`."""
        num_bad_starts = num_idle_workers = 0  # in a row
        while True:
            worker = self._workers[number]
            assert worker is not None
            try:
                blamed_call, reason = await self._serve(worker)
            finally:
                was_ready = worker.state is not WorkerState.STARTING
                is_drained = worker.state is WorkerState.DRAINING and not worker.calls
                worker.close()
            if is_drained:
                self.num_drained += 1
                await self._wait_for(worker)  # while it closes its environment
            else:
                self.num_lost += 1
                self._fail_calls(worker, blamed_call, reason)
            worker.child.signal_group(signal.SIGKILL)
            await process.stop([worker.child], grace_s=_STOP_GRACE_S)
            num_bad_starts = 0 if was_ready else num_bad_starts + 1
            num_idle_workers = 0 if worker.num_ended else num_idle_workers + 1
            if num_bad_starts >= MAX_BAD_STARTS:
                self._give_up(number, f"{reason} ({num_bad_starts} times in a row before it was ready)")
                return
            logger.log(logging.INFO if is_drained else logging.WARNING, "%s; a new process takes its place", reason)
            await asyncio.sleep(min(0.25 * (2**num_idle_workers - 1), _LONGEST_BACKOFF_S))
            try:
                self._workers[number] = self._start(number)
            except (OSError, StrettoError) as error:
                self._give_up(number, f"{worker.name} cannot be started: {error}")
                return

    def _give_up(self, number: int, reason: str) -> None:
        self._workers[number] = None
        left = sum(worker is not None for worker in self._workers)
        logger.error("%s; it is not replaced, workers left: %d", reason, left)
        if not left:
            self._failure = reason
            self._has_changed.set()

    async def _serve(self, worker: WorkerHandle) -> tuple[int | None, str]:
        """Receive from a worker until its end: the call that is to blame, if one is, and the reason."""
        worker.wire.setblocking(False)
        reader, worker.writer = await asyncio.open_connection(sock=worker.wire)
        worker.last_message_at = time.monotonic()
        self._has_changed.set()
        receiving = asyncio.create_task(self._receive_all(worker, reader))
        watching = asyncio.create_task(handle.watch(worker))
        try:
            done, _ = await asyncio.wait({receiving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if receiving not in done:
                return watching.result()
            try:
                return None, receiving.result()
            except StrettoError as error:
                return None, f"{worker.name} sent a message that cannot be read: {error}"
        finally:
            receiving.cancel()
            watching.cancel()
            await asyncio.gather(receiving, watching, return_exceptions=True)

    async def _receive_all(self, worker: WorkerHandle, reader: asyncio.StreamReader) -> str:
        """Process the messages of a worker until its socket closes; returns the reason."""
        while (message := await receive(reader, FromWorker)) is not None:
            worker.last_message_at = time.monotonic()
            match message:
                case Heartbeat():
                    pass
                case Ready():
                    worker.state = WorkerState.READY
                    self._has_changed.set()
                case OpenFailed(text=text):
                    return f"{worker.name}: {text}"
                case TurnRequest(call=number):
                    if (call := worker.calls.get(number)) and call.ctx is not None and not call.result.done():
                        call.answer(worker, message.turn, partial(handle.play_turn, call.ctx, message))
                case ModelRequest(call=number):
                    if (call := worker.calls.get(number)) and not call.result.done():
                        call.answer(worker, message.turn, partial(handle.ask_model, self._models, message))
                case _:
                    call = worker.end_call(message.call)
                    if call is None or call.result.done():
                        continue
                    if isinstance(message, CallFailed):
                        error = error_from(message.kind, message.text, message.reason)
                        call.result.set_exception(error)
                    else:
                        call.result.set_result(message)
        await self._wait_for(worker)
        return handle.describe_end(worker)

    async def _wait_for(self, worker: WorkerHandle) -> None:
        """Wait until the process has ended, for _STOP_GRACE_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S):
                await worker.child.wait()

    def _fail_calls(self, worker: WorkerHandle, blamed_call: int | None, reason: str) -> None:
        for number, call in worker.calls.items():
            if call.result.done():
                continue
            if number == blamed_call:
                text = f"environment {self._opening.name}: {reason}"
                call.result.set_exception(EnvError(text, reason=Reason.WORKER_HUNG))
            else:
                text = f"lost with its worker: {reason}"
                call.result.set_exception(EngineError(text, reason=Reason.WORKER_LOST))
        worker.calls.clear()

    async def close(self) -> None:
        """Close the sockets, wait for the workers to end, and kill those that do not."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            if worker.state is not WorkerState.ENDED:
                worker.close()
            self._fail_calls(worker, None, "the environment is closed")
        if endings := [asyncio.create_task(worker.child.wait()) for worker in workers if worker.child.pidfd >= 0]:
            await asyncio.wait(endings, timeout=_STOP_GRACE_S)
            for ending in endings:
                ending.cancel()
        await process.stop([w.child for w in workers if w.child.pidfd >= 0], grace_s=0.5)
        self._workers = [None] * len(self._workers)
        self._failure = f"environment {self._opening.name} is closed"
        self._has_changed.set()
        self._remove_logs()


def _remove(log_dir: Path | None) -> None:
    if log_dir is not None:
        shutil.rmtree(log_dir, ignore_errors=True)
