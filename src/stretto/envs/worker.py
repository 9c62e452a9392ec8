"""An environment's worker process: builds the environment, plays what it is asked to, asks for turns.

The policy is not here: every turn is asked of the orchestrator, whose recorder writes down tokens, logprobs
and versions as it does for an environment of its own process. A thread watches the event loop; when an
environment blocks it, the thread says which call does so and where, before the orchestrator kills the
process. Started by workers.py; ends with its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from stretto.base import log
from stretto.base.errors import ConfigError, EnvError, StrettoError
from stretto.base.limits import raise_file_limit
from stretto.envs.base import (
    Environment,
    Limits,
    Message,
    Reply,
    RolloutContext,
    RolloutResult,
    SingleTurnEnv,
    Split,
    TaskSource,
    load_environment,
    scored,
    tasks_of,
)
from stretto.envs.foreign import nearest, told
from stretto.envs.worker_wire import (
    BEAT_S,
    Answer,
    Ask,
    Beat,
    Cancel,
    Done,
    Failed,
    Open,
    Play,
    Prompt,
    Prompted,
    Ready,
    Refusal,
    Refused,
    Score,
    ToWorker,
    error_of,
    kind_of,
    packed,
    receive,
    receive_blocking,
)
from stretto.records.rollout import Task

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 3.0
_SPLITS: tuple[Split, ...] = ("train", "eval")
_call: ContextVar[int | None] = ContextVar("call", default=None)
"""The call on whose behalf code runs; tasks inherit it."""


def main() -> None:
    """`<file descriptor of the socket> <of the pipe for alarms> <role in the log>`."""
    wire, alarm, role = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    log.setup(role, None)
    raise_file_limit()
    opening = receive_blocking(wire, ToWorker)
    if not isinstance(opening, Open):
        return
    try:
        env, sources, ready = build(opening)
    except BaseException as cause:  # the boundary of a foreign module: it may even call sys.exit
        if isinstance(cause, KeyboardInterrupt):
            raise
        error = cause
        if not isinstance(cause, StrettoError):
            error = ConfigError(f"environment {opening.env_id!r}: {told(cause)}")
        logger.exception("cannot build %s", opening.env_id)
        wire.sendall(packed(Refused(kind=kind_of(error), text=str(error))))
        return
    asyncio.run(Worker(env, sources, alarm, opening.hang_timeout_s).run(wire, ready))


def build(opening: Open) -> tuple[Environment, dict[str, TaskSource], Ready]:
    """The environment, its tasks by split, and what the orchestrator has to know of it."""
    env = load_environment(opening.env_id, opening.args, opening.name, in_worker=True)
    sources, no_tasks = {}, {}
    for split in _SPLITS:
        try:
            sources[split] = tasks_of(env, split)
        except StrettoError as error:
            no_tasks[split] = str(error)
    ready = Ready(
        is_single_turn=isinstance(env, SingleTurnEnv),
        limits=getattr(env, "limits", None) or Limits(),
        num_tasks={split: source.num_tasks for split, source in sources.items()},
        ordered=[split for split, source in sources.items() if source.is_ordered],
        fingerprints={split: source.fingerprint for split, source in sources.items()},
        no_tasks=no_tasks,
        are_tasks_shared=getattr(env, "are_tasks_shared", False),
    )
    return env, sources, ready


class Worker:
    """Runs calls side by side on one event loop."""

    def __init__(
        self, env: Environment, sources: dict[str, TaskSource], alarm: int, hang_timeout_s: float
    ) -> None:
        self._env, self._sources = env, sources
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._asks: dict[int, asyncio.Future[Reply]] = {}
        self._ask_numbers = itertools.count()
        self._watchdog = Watchdog(alarm, hang_timeout_s)
        self._task = functools.lru_cache(maxsize=1024)(lambda split, index: sources[split].task(index))

    async def run(self, wire: socket.socket, ready: Ready) -> None:
        """Until the orchestrator hangs up."""
        reader, self._writer = await asyncio.open_connection(sock=wire)
        asyncio.get_running_loop().set_task_factory(self._watchdog.new_task)
        self.send(ready)
        beating = asyncio.create_task(self._beat())
        self._watchdog.start()
        while (message := await receive(reader, ToWorker)) is not None:
            self._hear(message)
        beating.cancel()
        for call in self._calls.values():
            call.cancel()
        close = getattr(self._env, "close", None)
        with contextlib.suppress(Exception):  # nobody is there to be told
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.gather(*self._calls.values(), return_exceptions=True)
                if inspect.iscoroutinefunction(close):
                    await close()

    def send(self, message: Any) -> None:
        self._writer.write(packed(message))

    def _hear(self, message: ToWorker) -> None:
        match message:
            case Play(call=number, task=task):
                self._start(number, self._play(number, task))
            case Prompt(call=number, task=task):
                self._start(number, self._prompt(number, task))
            case Score(call=number, task=task, text=text):
                self._start(number, self._score(number, task, text))
            case Cancel(call=number):
                if number in self._calls:
                    self._calls[number].cancel()
            case Answer(ask=number, reply=reply):
                if (ask := self._asks.get(number)) and not ask.done():
                    ask.set_result(reply)
            case Refusal(ask=number, kind=kind, text=text):
                if (ask := self._asks.get(number)) and not ask.done():
                    ask.set_exception(error_of(kind, text))

    def _start(self, number: int, work: Coroutine[Any, Any, Done | Prompted]) -> None:
        token = _call.set(number)  # the new task and all that it starts are of this call
        self._calls[number] = asyncio.create_task(self._end(number, work))
        _call.reset(token)

    async def _end(self, number: int, work: Coroutine[Any, Any, Done | Prompted]) -> None:
        """Exactly one end of a call, whatever the environment does."""
        try:
            ended = packed(await work)
        except asyncio.CancelledError:
            ended = packed(Failed(call=number, kind="EngineError", text="the call was cancelled"))
        except StrettoError as error:
            ended = packed(Failed(call=number, kind=kind_of(error), text=str(error)))
        except (Exception, SystemExit) as cause:  # the boundary of a rollout
            text = f"environment {self._env.name}: {told(cause)}"
            ended = packed(Failed(call=number, kind="EnvError", text=text))
        finally:
            self._calls.pop(number, None)
        self._writer.write(ended)

    # -- the three calls --

    def _own(self, task: Task) -> Task:
        """The environment's own task, made where it is needed."""
        return self._task(task.data["split"], task.data["index"])

    async def _play(self, number: int, task: Task) -> Done:
        result = await self._env.rollout(self._own(task), RemoteContext(self, number))
        return Done(call=number, result=_checked(self._env, result))

    async def _prompt(self, number: int, task: Task) -> Prompted:
        assert isinstance(self._env, SingleTurnEnv)
        messages = self._env.prompt(self._own(task))
        if inspect.isawaitable(messages):
            messages = await messages
        return Prompted(call=number, messages=list(messages))

    async def _score(self, number: int, task: Task, text: str) -> Done:
        assert isinstance(self._env, SingleTurnEnv)
        return Done(call=number, result=await scored(self._env.score(self._own(task), text)))

    # -- turns --

    async def ask(self, call: int, **wanted: Any) -> Reply:
        """A turn of the policy.

        Raises: LimitReached, EngineError as the orchestrator's recorder does.
        """
        number = next(self._ask_numbers)
        answer = self._asks[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(Ask(call=call, ask=number, **wanted))
            return await answer
        finally:
            del self._asks[number]

    async def _beat(self) -> None:
        while True:
            self._watchdog.ticked_at = time.monotonic()
            self.send(Beat())
            await asyncio.sleep(min(BEAT_S, self._watchdog.timeout_s / 4))


class RemoteContext(RolloutContext):
    """The policy in another process, as the environment of one call sees it."""

    def __init__(self, worker: Worker, call: int, name: str | None = None, is_trained: bool = True) -> None:
        self._worker, self._call, self._name, self._is_trained = worker, call, name, is_trained

    async def generate(
        self, prompt_ids: np.ndarray, tools: list[dict] | None = None, **sampling: Any
    ) -> Reply:
        prompt_ids = np.asarray(prompt_ids, dtype=np.int32)
        return await self._turn(messages=None, prompt_ids=prompt_ids, tools=tools, sampling=sampling)

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        return await self._turn(messages=list(messages), prompt_ids=None, tools=tools, sampling=sampling)

    def keep(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        raise ConfigError(
            "what is trained can only be chosen in the orchestrator's process; leave num_workers out"
        )

    def agent(self, name: str, *, is_trained: bool = True) -> RemoteContext:
        return RemoteContext(self._worker, self._call, name, is_trained)

    async def _turn(self, **wanted: Any) -> Reply:
        return await self._worker.ask(self._call, agent=self._name, is_trained=self._is_trained, **wanted)


class Watchdog:
    """Says through a pipe which call has blocked the event loop, and where, while it still does.

    It needs the interpreter's lock: code that blocks in C without releasing it is seen by its silence alone.
    """

    def __init__(self, pipe: int, timeout_s: float) -> None:
        self.ticked_at = time.monotonic()
        self.timeout_s = timeout_s
        self._pipe = pipe
        self._owners: weakref.WeakKeyDictionary[asyncio.Task, int | None] = weakref.WeakKeyDictionary()

    def new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task:
        """A task factory that remembers on whose behalf a task runs."""
        task = asyncio.Task(coro, loop=loop, **kwargs)
        self._owners[task] = _call.get()
        return task

    def start(self) -> None:
        loop, main = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, main), daemon=True, name="watchdog").start()

    def _watch(self, loop: asyncio.AbstractEventLoop, main: int) -> None:
        told = 0.0
        while True:
            time.sleep(self.timeout_s / 8)
            ticked_at = self.ticked_at
            if time.monotonic() - ticked_at < self.timeout_s * 0.7 or told == ticked_at:
                continue
            told = ticked_at
            task = asyncio.current_task(loop)
            frame = sys._current_frames().get(main)
            line = {
                "call": self._owners.get(task) if task else None,
                "place": nearest(traceback.extract_stack(frame)),
            }
            os.write(self._pipe, json.dumps(line).encode() + b"\n")


def _checked(env: Environment, result: Any) -> RolloutResult:
    if not isinstance(result, RolloutResult):
        raise EnvError(
            f"environment {env.name}: rollout returned {type(result).__name__}, not a RolloutResult"
        )
    return result


if __name__ == "__main__":
    main()
