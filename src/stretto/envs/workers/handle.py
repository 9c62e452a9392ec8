"""One worker process as the orchestrator sees it: its state, its calls, and how a hang or a death is noticed.

workers/pool.py starts the processes and decides what happens to their calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stretto.base import process
from stretto.base.errors import EnvError, StrettoError
from stretto.envs.base import RolloutContext
from stretto.envs.models import ChatModel, ModelReply, model_of
from stretto.envs.workers.wire import (
    HEARTBEAT_S,
    CallResult,
    ModelAnswer,
    ModelRequest,
    PromptResult,
    TurnFailed,
    TurnReply,
    TurnRequest,
    error_kind,
    packed,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Longest start of a worker: the environment's imports and data sets."""
CANCEL_GRACE_S = 10.0
"""A worker that has not ended a cancelled rollout after this long is considered hung."""
NUM_WARMUP_CALLS = 16
"""Calls after which a worker's memory is measured as its baseline; growth is counted from there."""


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # gets no more calls, ends with its last one, and is replaced by a new process
    ENDED = "ended"


@dataclass(frozen=True)
class WorkerLimits:
    """When a worker is replaced, and when it is killed; None for never."""

    memory_bytes: int | None = None
    """Private memory above which it is killed."""
    growth_bytes: int | None = None
    """Growth above its baseline after which it is replaced."""
    max_calls: int | None = None
    """Calls after which it is replaced."""


NO_WORKER_LIMITS = WorkerLimits()


@dataclass(eq=False)
class Call:
    """A rollout, a prompt or a score that runs in a worker."""

    ctx: RolloutContext | None
    result: asyncio.Future[CallResult | PromptResult]
    turns: set[asyncio.Task[None]] = field(default_factory=set)
    cancelled_at: float | None = None

    def answer(self, worker: WorkerHandle, number: int, play: Callable[[], Awaitable[TurnReply | ModelAnswer]]) -> None:
        """Answer request `number` of the worker with what `play` gives, or with its error."""
        task = asyncio.create_task(_answer(worker, number, play))
        self.turns.add(task)
        task.add_done_callback(self.turns.discard)


@dataclass(eq=False)
class WorkerHandle:
    """One worker process, from its start to its end."""

    name: str
    child: process.Child
    wire: socket.socket
    alarm: int  # read end of its watchdog's pipe; -1 when closed
    hang_timeout_s: float
    worker_limits: WorkerLimits = NO_WORKER_LIMITS
    baseline_bytes: int | None = None  # private memory after NUM_WARMUP_CALLS calls
    state: WorkerState = WorkerState.STARTING
    calls: dict[int, Call] = field(default_factory=dict)
    num_ended: int = 0  # calls that have ended
    last_message_at: float = field(default_factory=time.monotonic)
    writer: asyncio.StreamWriter | None = None
    is_drained: asyncio.Event = field(default_factory=asyncio.Event)  # DRAINING, and its last call has ended

    def send(self, message: Any) -> None:
        assert self.writer is not None
        self.writer.write(packed(message))

    def end_call(self, number: int) -> Call | None:
        """Remove a call that has ended; drain the worker if it has reached max_calls."""
        self.num_ended += 1
        call = self.calls.pop(number, None)
        max_calls = self.worker_limits.max_calls
        if max_calls is not None and self.num_ended >= max_calls:
            self.drain(f"it has ended {self.num_ended} calls (worker_max_calls = {max_calls})")
        self._check_drained()
        return call

    def drain(self, reason: str) -> None:
        """Give the worker no more calls, and end it when its last one has ended."""
        if self.state is WorkerState.READY:
            logger.info("%s is replaced when its %d calls have ended: %s", self.name, len(self.calls), reason)
            self.state = WorkerState.DRAINING
            self._check_drained()

    def _check_drained(self) -> None:
        if self.state is WorkerState.DRAINING and not self.calls:
            self.is_drained.set()

    def describe_silence(self) -> tuple[int | None, str]:
        """The call that blocks the event loop, if the watchdog knows it, and the text of the error."""
        text, call = f"{self.name} sent nothing for {self.hang_timeout_s:g} s", None
        with contextlib.suppress(OSError, ValueError):
            if lines := os.read(self.alarm, 1 << 16).splitlines():
                alarm = json.loads(lines[-1])
                call = alarm["call"]
                text = f"{text}: its event loop is blocked at {alarm['place']}"
        return call, text

    def close(self) -> None:
        """Close the socket and the pipe, without waiting for the process."""
        self.state = WorkerState.ENDED
        if self.writer is not None:
            self.writer.close()
        else:
            self.wire.close()
        if self.alarm >= 0:
            os.close(self.alarm)
            self.alarm = -1

    def kill(self) -> None:
        """Kill the process and all that it has started; for code that cannot await."""
        self.close()
        self.child.kill()


async def _answer(worker: WorkerHandle, number: int, play: Callable[[], Awaitable[TurnReply | ModelAnswer]]) -> None:
    message: TurnReply | ModelAnswer | TurnFailed
    try:
        message = await play()
    except StrettoError as error:
        message = TurnFailed(turn=number, kind=error_kind(error), text=str(error))
    except Exception as cause:  # the boundary of a rollout
        logger.exception("a request of %s failed", worker.name)
        message = TurnFailed(turn=number, kind="EngineError", text=f"{type(cause).__name__}: {cause}")
    if worker.state is not WorkerState.ENDED:
        worker.send(message)


async def play_turn(ctx: RolloutContext, request: TurnRequest) -> TurnReply:
    """Play the turn that a worker requests."""
    agent = ctx if request.agent is None else ctx.agent(request.agent, is_trained=request.is_trained)
    if request.conversation:
        agent = agent.conversation(request.conversation)
    if request.messages is not None:
        reply = await agent.chat(request.messages, request.tools, **request.sampling)
    else:
        assert request.prompt_ids is not None
        reply = await agent.generate(request.prompt_ids, request.tools, **request.sampling)
    return TurnReply(turn=request.turn, reply=reply)


async def ask_model(models: Mapping[str, ChatModel], request: ModelRequest) -> ModelAnswer:
    """Ask the model that a worker names."""
    model = model_of(models, request.model, EnvError)
    if request.is_scored:
        score = await model.score(request.messages, request.tools)
        reply = ModelReply(text=repr(score), message={}, finish_reason="stop")
    else:
        reply = await model.chat(request.messages, request.tools, **request.options)
    return ModelAnswer(turn=request.turn, reply=reply)


async def watch(worker: WorkerHandle) -> tuple[int | None, str]:
    """Wait until a worker must end; returns the call that caused it, if one did, and the reason."""
    tick_s = min(HEARTBEAT_S, worker.hang_timeout_s / 8)
    started_at = looked_at = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(tick_s):
                await worker.is_drained.wait()
                return None, f"{worker.name} has drained"
        now = time.monotonic()
        if now - looked_at > tick_s + worker.hang_timeout_s / 2:
            worker.last_message_at = now  # this process was busy itself, so the silence proves nothing
        looked_at = now
        if worker.child.returncode is not None:
            return None, describe_end(worker)
        if worker.state is WorkerState.STARTING:
            if now - started_at > START_TIMEOUT_S:
                return None, f"{worker.name} was not ready within {START_TIMEOUT_S:g} s"
        elif now - worker.last_message_at > worker.hang_timeout_s:
            return worker.describe_silence()
        if (verdict := check_memory(worker)) is not None:
            return verdict
        for number, call in worker.calls.items():
            if call.cancelled_at is not None and now - call.cancelled_at > CANCEL_GRACE_S:
                text = f"{worker.name} did not end a cancelled rollout within {CANCEL_GRACE_S:g} s"
                return number, text


def check_memory(worker: WorkerHandle) -> tuple[int | None, str] | None:
    """Check a worker's memory: None if it may go on, else the result of `watch`. May drain the worker."""
    limits, used = worker.worker_limits, private_bytes(worker.child.pid)
    if limits.memory_bytes is not None and used > limits.memory_bytes:
        only = next(iter(worker.calls)) if len(worker.calls) == 1 else None
        rule = f"more than worker_memory_bytes = {limits.memory_bytes}"
        return only, f"{worker.name} was killed: it used {used} bytes of memory, {rule}"
    if worker.num_ended < NUM_WARMUP_CALLS:
        return None
    if worker.baseline_bytes is None:
        worker.baseline_bytes = used
    grown = used - worker.baseline_bytes
    if limits.growth_bytes is not None and grown > limits.growth_bytes:
        worker.drain(f"it has grown by {grown} bytes (worker_growth_bytes = {limits.growth_bytes})")
    return None


def private_bytes(pid: int) -> int:
    """Resident memory of a process without what it shares with files; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * resource.getpagesize()


def describe_end(worker: WorkerHandle) -> str:
    """How a worker process ended, with the last lines of its log."""
    returncode = worker.child.returncode
    how = "closed its socket" if returncode is None else f"ended ({process.describe_exit(returncode)})"
    lines = [line for line in worker.child.tail(8) if line.strip()]
    last = "; its last lines:\n  " + "\n  ".join(lines) if lines else ""
    return f"{worker.name} {how}{last}"
