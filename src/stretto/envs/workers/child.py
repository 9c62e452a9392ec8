"""An environment's worker process: builds the environment, runs calls, requests turns of the policy.

The policy is not here: every turn is requested from the orchestrator, whose recorder records tokens, logprobs
and versions as for an environment in its own process. A watchdog thread watches the event loop; when an
environment blocks it, the thread reports which call does so and where, before the orchestrator kills the
process. workers/pool.py starts the process, which ends when its socket is closed.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.base import log
from stretto.base.errors import ConfigError, EnvError, StrettoError
from stretto.base.foreign import describe_error, guarded, innermost_location
from stretto.base.runtime import raise_file_limit
from stretto.envs.base import (
    Environment,
    EpisodeInfo,
    EpisodeLimits,
    Message,
    Reply,
    RolloutContext,
    RunInfo,
    SingleTurnEnv,
    Split,
    TaskSource,
    checked_prompt,
    checked_score,
    load_environment,
    tasks_of,
    where_of,
)
from stretto.envs.models import ChatModel, ModelReply, model_of
from stretto.envs.result import checked_result
from stretto.envs.workers.wire import (
    HEARTBEAT_S,
    CallFailed,
    CallResult,
    CancelCall,
    Heartbeat,
    ModelAnswer,
    ModelRequest,
    Open,
    OpenFailed,
    PromptResult,
    Ready,
    StartCall,
    ToWorker,
    TurnFailed,
    TurnReply,
    TurnRequest,
    error_from,
    error_kind,
    packed,
    packed_checked,
    receive,
    receive_blocking,
    split_and_index,
)
from stretto.records.rollout import Task

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 3.0
_SPLITS: tuple[Split, ...] = ("train", "eval")
_call: ContextVar[int | None] = ContextVar("call", default=None)
"""The call that the running code belongs to; new tasks inherit it."""


def main() -> None:
    """Arguments: file descriptor of the socket, of the watchdog's pipe, role in the log."""
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
        where = f"environment {opening.env_id!r}"
        error = cause if isinstance(cause, StrettoError) else ConfigError(f"{where}: {describe_error(cause)}")
        logger.exception("cannot build %s", opening.env_id)
        wire.sendall(packed(OpenFailed(kind=error_kind(error), text=str(error))))
        return
    worker = Worker(env, sources, alarm, opening.hang_timeout_s, opening.models)
    RemoteModel.worker = worker
    asyncio.run(worker.run(wire, ready))


def build(opening: Open) -> tuple[Environment, dict[str, TaskSource], Ready]:
    """The environment, its tasks by split, and the facts that the orchestrator needs."""
    run = RunInfo(models={name: RemoteModel(name) for name in opening.models}, directory=opening.directory)
    env = load_environment(opening.env_id, opening.args, opening.name, run, in_worker=True)
    sources: dict[str, TaskSource] = {}
    no_tasks: dict[str, str] = {}
    for split in _SPLITS:
        try:
            sources[split] = tasks_of(env, split)
        except StrettoError as error:
            no_tasks[split] = str(error)
    ready = Ready(
        is_single_turn=isinstance(env, SingleTurnEnv),
        limits=getattr(env, "limits", None) or EpisodeLimits(),
        num_tasks={split: source.num_tasks for split, source in sources.items()},
        ordered=[split for split, source in sources.items() if source.is_ordered],
        fingerprints={split: source.fingerprint for split, source in sources.items()},
        no_tasks=no_tasks,
        are_tasks_shared=getattr(env, "are_tasks_shared", False),
    )
    return env, sources, ready


class Worker:
    """Runs the calls of this process side by side on one event loop."""

    def __init__(
        self,
        env: Environment,
        sources: dict[str, TaskSource],
        alarm: int,
        hang_timeout_s: float,
        models: Sequence[str] = (),
    ) -> None:
        self._env, self._sources = env, sources
        self.models = {name: RemoteModel(name) for name in models}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._turns: dict[int, asyncio.Future[Any]] = {}
        self._turn_numbers = itertools.count()
        self._watchdog = Watchdog(alarm, hang_timeout_s)
        self._task = functools.lru_cache(maxsize=1024)(lambda split, index: sources[split].task(index))

    async def run(self, wire: socket.socket, ready: Ready) -> None:
        """Run calls until the orchestrator closes the socket."""
        reader, self._writer = await asyncio.open_connection(sock=wire)
        asyncio.get_running_loop().set_task_factory(self._watchdog.new_task)
        self.send(ready)
        heartbeat = asyncio.create_task(self._send_heartbeats())
        self._watchdog.start()
        while (message := await receive(reader, ToWorker)) is not None:
            self._handle(message)
        heartbeat.cancel()
        for call in self._calls.values():
            call.cancel()
        close = getattr(self._env, "close", None)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.gather(*self._calls.values(), return_exceptions=True)
                if inspect.iscoroutinefunction(close):
                    await close()
        except Exception:  # the boundary of a foreign method; only the log is left for the error
            logger.exception("close() of the environment failed")

    def send(self, message: Any) -> None:
        self._writer.write(packed(message))

    def _handle(self, message: ToWorker) -> None:
        match message:
            case StartCall(call=number):
                token = _call.set(number)  # the new task, and all tasks it starts, belong to this call
                self._calls[number] = asyncio.create_task(self._run_call(message))
                _call.reset(token)
            case CancelCall(call=number):
                if number in self._calls:
                    # Its task may not have begun: it could not end the call if it were cancelled before.
                    asyncio.get_running_loop().call_soon(self._calls[number].cancel)
            case TurnReply(turn=number, reply=reply) | ModelAnswer(turn=number, reply=reply):
                if (turn := self._turns.get(number)) and not turn.done():
                    turn.set_result(reply)
            case TurnFailed(turn=number, kind=kind, text=text):
                if (turn := self._turns.get(number)) and not turn.done():
                    turn.set_exception(error_from(kind, text))

    async def _run_call(self, start: StartCall) -> None:
        """Run a call and send exactly one message that ends it, whatever the environment does."""
        number = start.call
        run: dict[str, Callable[[StartCall], Awaitable[CallResult | PromptResult]]]
        run = {"rollout": self._play, "prompt": self._prompt, "score": self._score}
        try:
            with guarded(EnvError, f"environment {self._env.name}"):
                data = packed_checked(await run[start.method](start))
        except asyncio.CancelledError:
            data = packed(CallFailed(call=number, kind="EngineError", text="the call was cancelled"))
        except StrettoError as error:
            failure = CallFailed(call=number, kind=error_kind(error), text=str(error), reason=error.reason)
            data = packed(failure)
        finally:
            self._calls.pop(number, None)
        self._writer.write(data)

    # -- the three calls --

    def _task_of(self, start: StartCall) -> Task:
        """The environment's own task; the orchestrator's has split and index only.

        A group that was drawn before the run had workers brings the environment's own task.
        """
        found = split_and_index(start.task)
        return start.task if found is None else self._task(*found)

    async def _play(self, start: StartCall) -> CallResult:
        result: object = self._env.rollout(self._task_of(start), RemoteContext(self, start.call, start.episode))
        if inspect.isawaitable(result):
            result = await result
        checked = checked_result(result, f"environment {self._env.name}: rollout")
        return CallResult(call=start.call, result=msgspec.structs.replace(checked, note=None))

    async def _prompt(self, start: StartCall) -> PromptResult:
        assert isinstance(self._env, SingleTurnEnv)
        messages = self._env.prompt(self._task_of(start))
        if inspect.isawaitable(messages):
            messages = await messages
        return PromptResult(call=start.call, messages=checked_prompt(messages, where_of(self._env, "prompt")))

    async def _score(self, start: StartCall) -> CallResult:
        assert isinstance(self._env, SingleTurnEnv)
        score = self._env.score(self._task_of(start), start.text)
        result = await checked_score(score, where_of(self._env, "score"))
        return CallResult(call=start.call, result=msgspec.structs.replace(result, note=None))

    # -- turns --

    async def request_turn(self, call: int, **request: Any) -> Reply:
        """Request a turn of the policy and wait for the reply.

        Raises: LimitReached, EngineError as the orchestrator's recorder does.
        """
        return await self._request(lambda number: TurnRequest(call=call, turn=number, **request))

    async def request_model(self, call: int, model: str, **request: Any) -> ModelReply:
        """Ask a frozen model of the run and wait for its reply.

        Raises: EngineError, EnvError as the orchestrator's client of the model does.
        """
        return await self._request(lambda number: ModelRequest(call=call, turn=number, model=model, **request))

    async def _request(self, build: Callable[[int], TurnRequest | ModelRequest]) -> Any:
        """Send the request with this number and wait for what answers it."""
        number = next(self._turn_numbers)
        reply = self._turns[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(packed_checked(build(number)))
            return await reply
        finally:
            del self._turns[number]

    async def _send_heartbeats(self) -> None:
        while True:
            self._watchdog.ticked_at = time.monotonic()
            self.send(Heartbeat())
            await asyncio.sleep(min(HEARTBEAT_S, self._watchdog.timeout_s / 4))


class RemoteContext(RolloutContext):
    """The context of one call: passes turns on to the orchestrator."""

    def __init__(
        self,
        worker: Worker,
        call: int,
        episode: EpisodeInfo | None,
        name: str | None = None,
        is_trained: bool = True,
        *,
        number: int = 0,
    ) -> None:
        self._worker, self._call, self._name, self._is_trained = worker, call, name, is_trained
        self._conversation, self._episode = number, episode

    @property
    def sampling(self) -> None:
        """Not known here."""

    @property
    def episode(self) -> EpisodeInfo | None:
        return self._episode

    async def generate(
        self, prompt_ids: Int[np.ndarray, " prompt"], tools: list[dict] | None = None, **sampling: Any
    ) -> Reply:
        prompt_ids = np.asarray(prompt_ids, dtype=np.int32)
        return await self._turn(messages=None, prompt_ids=prompt_ids, tools=tools, sampling=sampling)

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        return await self._turn(messages=list(messages), prompt_ids=None, tools=tools, sampling=sampling)

    def keep(self, sequences: Sequence[tuple[Int[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]]) -> None:
        raise ConfigError("ctx.keep works in the orchestrator's process only; remove num_workers")

    def agent(self, name: str, *, is_trained: bool = True) -> RemoteContext:
        return RemoteContext(self._worker, self._call, self._episode, name, is_trained)

    def conversation(self, number: int) -> RemoteContext:
        episode, name = self._episode, self._name
        return RemoteContext(self._worker, self._call, episode, name, self._is_trained, number=number)

    def model(self, name: str) -> ChatModel:
        return model_of(self._worker.models, name, EnvError)

    async def _turn(self, **request: Any) -> Reply:
        request |= {"agent": self._name, "is_trained": self._is_trained, "conversation": self._conversation}
        return await self._worker.request_turn(self._call, **request)


class RemoteModel(ChatModel):
    """A frozen model of the run, which the orchestrator asks; so its limit and cache are those of all workers."""

    worker: Worker | None = None  # of this process, once it runs

    def __init__(self, name: str) -> None:
        self.name = name

    async def chat(self, messages: Sequence[Message], tools: list[dict] | None = None, **options: Any) -> ModelReply:
        return await self._ask(messages=list(messages), tools=tools, options=options)

    async def score(self, messages: Sequence[Message], tools: list[dict] | None = None) -> float:
        return float((await self._ask(messages=list(messages), tools=tools, options={}, is_scored=True)).text)

    async def _ask(self, **request: Any) -> ModelReply:
        call = _call.get()
        if self.worker is None or call is None:
            raise EnvError(f"models.{self.name}: asked outside of an episode; ask it in prompt, score or rollout")
        return await self.worker.request_model(call, self.name, **request)


class Watchdog:
    """Reports through a pipe which call blocks the event loop, and where, while it still does.

    The thread needs the interpreter's lock. If C code blocks without releasing it, the orchestrator only sees that
    heartbeats stop.
    """

    def __init__(self, pipe: int, timeout_s: float) -> None:
        self.ticked_at = time.monotonic()
        self.timeout_s = timeout_s
        self._pipe = pipe
        self._owners: weakref.WeakKeyDictionary[asyncio.Task, int | None] = weakref.WeakKeyDictionary()

    def new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task:
        """A task factory that remembers which call a task belongs to."""
        task = asyncio.Task(coro, loop=loop, **kwargs)
        self._owners[task] = _call.get()
        return task

    def start(self) -> None:
        loop, main = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, main), daemon=True, name="watchdog").start()

    def _watch(self, loop: asyncio.AbstractEventLoop, main: int) -> None:
        reported = 0.0  # the tick whose delay was reported last
        while True:
            time.sleep(self.timeout_s / 8)
            ticked_at = self.ticked_at
            if time.monotonic() - ticked_at < self.timeout_s * 0.7 or reported == ticked_at:
                continue
            reported = ticked_at
            task = asyncio.current_task(loop)
            frame = sys._current_frames().get(main)
            line = {
                "call": self._owners.get(task) if task else None,
                "place": innermost_location(traceback.extract_stack(frame)),
            }
            os.write(self._pipe, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
