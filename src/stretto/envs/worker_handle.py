"""One worker process as the orchestrator sees it: its state, its calls, and how it hangs or dies.

workers.py starts them and decides what becomes of their calls; here is what one is and how it is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stretto.base import process
from stretto.base.errors import StrettoError
from stretto.envs.base import RolloutContext
from stretto.envs.worker_wire import BEAT_S, Answer, Ask, Done, Prompted, Refusal, kind_of, packed

START_TIMEOUT_S = 300.0
"""Longest start of a worker: imports and data sets of an environment."""
CANCEL_GRACE_S = 10.0
"""A worker that has not ended a cancelled rollout after so long hangs."""


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


async def answer(worker: Worker, ctx: RolloutContext, ask: Ask) -> None:
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


async def watch(worker: Worker) -> tuple[int | None, str]:
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
            return None, died(worker)
        if worker.state is State.STARTING:
            if now - started_at > START_TIMEOUT_S:
                return None, f"{worker.name} was not ready within {START_TIMEOUT_S:g} s"
        elif now - worker.heard_at > worker.hang_timeout_s:
            return worker.why_silent()
        for number, call in worker.calls.items():
            if call.cancelled_at is not None and now - call.cancelled_at > CANCEL_GRACE_S:
                text = f"{worker.name} did not end a cancelled rollout within {CANCEL_GRACE_S:g} s"
                return number, text


def died(worker: Worker) -> str:
    """How a process ended, with its last lines."""
    returncode = worker.child.returncode
    how = "hung up" if returncode is None else f"ended ({process.describe_exit(returncode)})"
    lines = [line for line in worker.child.tail(8) if line.strip()]
    last = "; its last lines:\n  " + "\n  ".join(lines) if lines else ""
    return f"{worker.name} {how}{last}"
