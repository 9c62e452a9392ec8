"""The engine on an event loop: requests and admin calls take effect between two steps.

    RUNNING <-> PAUSED               pause(keep), pause(abort), resume
    RUNNING, PAUSED -> SLEEPING      sleep; pause and resume do not wake it
    SLEEPING, PAUSED -> RUNNING      wake_up, when weights and cache are both in memory (from PAUSED too, as in vLLM)
    RUNNING -> DRAINING -> PAUSED    pause(wait); requests that arrive while draining are held until resume
    any -> FAILED                    a step raised; every request fails, `run` raises, the process ends

A request that cannot be given slots, or whose text cannot be decoded, fails alone; the core sets its `failure`.

One task, `run`, owns the core: it applies commands, runs steps and delivers finished requests. Steps run in one worker
thread, so that the event loop can answer /health and accept requests. The thread runs steps in a row until a request
ends or arrives, a command waits, or a stream is open. Measured on a 0.1M model: steps on the event loop save 12 % of
the CPU time of a single stream and nothing with 64 requests; if requests come and go they cost 4 %, because new
requests join a step later. So all steps run in the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from stretto.base.errors import DataError, EngineError
from stretto.inference.embedded.adjustments import Encode
from stretto.inference.embedded.core import EngineCore
from stretto.inference.embedded.metrics import Metrics
from stretto.inference.embedded.scheduler import EngineRequest, RequestState
from stretto.inference.limits import check_queue
from stretto.inference.text import Decode, TokenWatcher
from stretto.models.hub import export_tensors
from stretto.models.lora import Adapter, load_adapter
from stretto.models.tracing.tracer import Tracer
from stretto.records.generate import GenerateRequest
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.transports.engine import api
from stretto.transports.engine.api import EngineStopping, Refusal
from stretto.transports.engine.updates import Updated
from stretto.transports.weights import receive
from stretto.transports.weights.layout import Receiver
from stretto.transports.weights.sums import compare_sums

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    FAILED = "failed"


FAILED = "the engine has failed; its log says why"
_STOPPED = (EngineState.PAUSED, EngineState.SLEEPING)


class _PartialLoadError(EngineError):
    """Old and new weights are mixed, so no token may be sampled and the engine must end."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted request: its future and, if streamed, the queue of its tokens (None ends it)."""

    request: EngineRequest
    future: asyncio.Future[EngineRequest]
    events: asyncio.Queue[list[tuple[int, int, float]] | None] | None = None

    def forward_tokens(self) -> None:
        """Put the tokens since the last call into `events`."""
        assert self.events is not None and self.request.watcher is not None, "a streamed request has both"
        if tokens := self.request.watcher.pop_events():
            self.events.put_nowait(tokens)


class Engine:
    """Runs one EngineCore; all methods are called on the event loop."""

    def __init__(
        self, core: EngineCore, *, model_name: str = "model", max_waiting: int = 4096,
        decoder: Callable[[], Decode] | None = None, encoder: Callable[[], Encode] | None = None,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self.core, self.max_waiting, self.state = core, max_waiting, EngineState.RUNNING
        self.metrics = Metrics(model_name)
        self._decoder, self._encoder = decoder, encoder
        self._tracer = tracer or Tracer(None, "", frozenset())
        self._inbox: list[EngineRequest] = []
        self._cancelled: list[str] = []
        self._held_requests: dict[EngineRequest, None] = {}
        self._is_closing = False
        self._tickets: dict[str, Ticket] = {}
        self._streams: set[Ticket] = set()
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-step")
        self._receiving = ThreadPoolExecutor(1, thread_name_prefix="engine-receive")  # one version after the other
        self._updates: set[asyncio.Task[Updated]] = set()

    def submit(self, spec: GenerateRequest, *, is_streamed: bool = False) -> Ticket:
        """Queue a request.

        Raises: Refusal 400 if it can never be served; 409, 429 or 503 if it cannot be served now.
        """
        if self.state is EngineState.FAILED:
            raise Refusal(FAILED, 503)
        reason = self.core.refusal_reason(spec)
        if reason is not None:
            raise Refusal(reason)
        if spec.request_id in self._tickets:
            raise Refusal(f"request_id: {spec.request_id!r} is in use by an unfinished request", 409)
        check_queue(self.num_waiting, self.max_waiting)
        stops, bad_words = spec.sampling.stop, spec.sampling.bad_words
        encode = self._encoder() if bad_words and self._encoder is not None else None
        request = self.core.build_request(spec, encode)
        decode = None
        if stops:
            if self._decoder is None:
                raise Refusal("stop: stop strings need a tokenizer, and this engine has none; use stop_token_ids")
            decode = self._decoder()
        if stops or is_streamed:
            request.watcher = TokenWatcher(spec, decode, is_streamed=is_streamed)
        ticket = Ticket(request, asyncio.get_running_loop().create_future())
        self._tickets[spec.request_id] = ticket
        if is_streamed:
            ticket.events = asyncio.Queue()
            self._streams.add(ticket)
        if self.state is EngineState.DRAINING:
            self._held_requests[request] = None
        else:
            self._inbox.append(request)
        self._wake.set()
        return ticket

    async def generate(self, spec: GenerateRequest) -> EngineRequest:
        """Return the finished request; cancelling the caller aborts it, which frees its blocks."""
        return await self.result(self.submit(spec))

    async def result(self, ticket: Ticket) -> EngineRequest:
        """Return the finished request of a ticket; cancelling the caller aborts it."""
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise

    async def stream(self, ticket: Ticket) -> AsyncGenerator[list[tuple[int, int, float]], None]:
        """Yield lists of (sample, token, logprob); when they end, `ticket.future` has the result."""
        assert ticket.events is not None, "submitted with is_streamed"
        try:
            while (events := await ticket.events.get()) is not None:
                yield events
            await ticket.future
        finally:
            if not ticket.future.done():
                self.cancel(ticket)

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self._held_requests) + len(self.core.scheduler.waiting)

    def metrics_page(self) -> str:
        """The engine's metrics as Prometheus text."""
        return self.metrics.render(self.core, len(self._inbox) + len(self._held_requests))

    async def update(self, manifest: WeightManifest, group: WeightGroup | None = None) -> Updated:
        """Load new weights between two steps; running requests continue with them.

        They are received and verified while steps run; the engine stands still for the copy alone. Only weights that
        are received on a GPU have no place beside those in use, and travel while it stands still.

        Raises: Refusal if they do not fit the model, WireError if they cannot be read; in both cases nothing has
        changed.
        """
        if self.core.are_weights_away:
            raise Refusal(f"the engine sleeps; POST {api.WAKE_UP}?tags=weights first", 409)
        reason = self.core.weights_refusal_reason(manifest)
        if reason is not None:
            raise Refusal(reason)
        # It goes on if the caller leaves: what was received has to be closed.
        task = asyncio.create_task(self._update(manifest, group))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def _update(self, manifest: WeightManifest, group: WeightGroup | None) -> Updated:
        started = time.perf_counter()
        device, info = self.core.cache.device, manifest.adapter

        def read() -> tuple[Receiver, Adapter | None]:
            tensors = receive(manifest, group, device=device)
            if info is None:
                return tensors, None
            with tensors:
                copies = ((name, tensor.to(device, copy=True)) for name, tensor in tensors)
                return tensors, Adapter.from_tensors(copies, info.rank, info.scaling)

        tensors, adapter = await asyncio.get_running_loop().run_in_executor(self._receiving, read)

        def load() -> tuple[int, list[str]]:
            if info is not None and adapter is not None:
                self.core.load_adapter(info.name, adapter, manifest.version)
                return 0, []
            num_loaded = 0

            def counted() -> Iterator[tuple[str, Tensor]]:
                nonlocal num_loaded
                for pair in tensors:
                    num_loaded += 1
                    yield pair

            tensors.check_unchanged()  # they may have waited for the end of a step
            try:
                self.core.load_weights(manifest.version, counted())
                tensors.check_unchanged()
                return compare_sums(manifest, export_tensors(self.core.model))
            except Exception as error:  # what matters is whether weights were changed before it
                if not num_loaded:  # the old weights are complete
                    raise
                message = f"version {manifest.version} was loaded in part: {error}"
                raise _PartialLoadError(message) from error

        async def command() -> Updated:
            stopped = time.perf_counter()
            if self.core.are_weights_away:
                raise Refusal("the engine was put to sleep while the weights were on their way", 409)
            num_compared, differing = await self._in_thread(load)
            now = time.perf_counter()
            self.metrics.num_updates += 1
            self.metrics.update_s += now - stopped
            message = "loaded version=%d in %.1f ms, %.1f after it was there, running=%d waiting=%d"
            counts = self.core.scheduler.num_requests
            logger.info(message, manifest.version, (now - started) * 1e3, (now - stopped) * 1e3, *counts)
            return Updated(now - stopped, num_compared, tuple(differing))

        with contextlib.closing(tensors):
            return await self._between_steps(command)

    async def load_adapter(self, name: str, path: str, *, is_replacing: bool) -> None:
        """Serve the PEFT adapter in the directory `path` under a name.

        Raises: Refusal if it does not fit this model, or if the name is taken and is_replacing is False.
        """

        async def command() -> None:
            if not is_replacing and self.core.adapters.get(name) is not None:
                raise Refusal(f"lora_name: {name!r} is loaded already; load_inplace replaces it")
            try:
                adapter = await self._in_thread(lambda: load_adapter(path))
                self.core.load_adapter(name, adapter)
            except DataError as error:
                raise Refusal(f"lora_path: {error}") from error
            logger.info("loaded adapter %s from %s", name, path)

        await self._between_steps(command)

    async def unload_adapter(self, name: str) -> None:
        """Accept no more requests for an adapter; running ones keep it.

        Raises: Refusal 404 if no adapter has this name.
        """

        def command() -> None:
            if self.core.adapters.get(name) is None:
                raise Refusal(f"lora_name: no adapter is called {name!r}", 404)
            self.core.adapters.unload(name)
            logger.info("unloaded adapter %s", name)

        await self._between_steps(command)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop running steps.

        mode: "keep" freezes running requests, "wait" waits for their end, "abort" ends them with the tokens they have.
        """

        def command() -> asyncio.Future[None] | None:
            if mode == "abort":
                self._deliver(self.core.abort())
            if self.state is EngineState.SLEEPING:
                return None
            if mode == "wait" and self.core.has_work:
                self.state = EngineState.DRAINING
                drained = asyncio.get_running_loop().create_future()
                self._drain_waiters.append(drained)
                return drained
            self.state = EngineState.PAUSED
            if clear_cache:
                self.core.reset_prefix_cache()
            return None

        drained = await self._between_steps(command)
        if drained is not None:
            await drained
            if clear_cache:
                await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Run steps again, unless the engine sleeps."""
        await self._between_steps(lambda: None if self.state is EngineState.SLEEPING else self._resume())

    def _resume(self) -> None:
        self.state = EngineState.RUNNING
        self._resolve_drained()
        self._release_held_requests()

    def _release_held_requests(self) -> None:
        self._inbox.extend(self._held_requests)
        self._held_requests.clear()

    async def sleep(self, level: int) -> None:
        """End running requests and free the memory of cache and weights; level 1 keeps the weights in a file."""

        async def command() -> None:
            if self.state is EngineState.SLEEPING:
                return
            self._deliver(self.core.abort())
            self.state = EngineState.SLEEPING
            num_bytes = await self._in_thread(lambda: self.core.put_away(keeps_weights=level == 1))
            logger.info("asleep at level %d: %d bytes freed", level, num_bytes)

        await self._between_steps(command)

    async def wake_up(self, tags: Iterable[str]) -> None:
        """Allocate `weights` or `kv_cache` again; when both are allocated, requests continue."""

        async def command() -> None:
            if self.state in _STOPPED and await self._in_thread(lambda: self.core.bring_back(tags)):
                self._resume()

        await self._between_steps(command)

    async def reset_prefix_cache(self) -> None:
        await self._between_steps(self.core.reset_prefix_cache)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End these requests (all if None) with the tokens they have and finish_reason "abort"."""
        ids = None if request_ids is None else list(request_ids)

        def command() -> None:
            self._release_held_requests()  # they are aborted like all others
            self._flush_inbox()
            self._deliver(self.core.abort(ids))

        await self._between_steps(command)

    async def run(self) -> None:
        """Run steps until this task is cancelled or a step raises."""
        try:
            while True:
                await self._apply_commands()
                if self.state in _STOPPED or not self.core.has_work:
                    if self.state is EngineState.DRAINING:
                        self.state = EngineState.PAUSED
                        self._resolve_drained()
                    if not (self._inbox or self._commands or self._cancelled):
                        self._wake.clear()
                        await self._wake.wait()
                    continue
                await self._step()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.state = EngineState.FAILED
            logger.exception("the engine failed")
            self._fail_all(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._is_closing = True  # read by the thread that runs steps

    def close(self) -> None:
        self._is_closing = True
        self._fail_all(EngineStopping("the engine is shutting down"))
        if self._tracer.is_tracing:  # it must end in the thread in which it was started
            self._thread.submit(self._tracer.close)
        self._receiving.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=False, cancel_futures=not self._tracer.is_tracing)

    def _in_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _step(self) -> None:
        finished = await self._in_thread(self._run_steps)
        for ticket in self._streams:
            ticket.forward_tokens()
        self._deliver(finished)

    def _run_steps(self) -> list[EngineRequest]:
        """Run steps, in the thread, until a request ends or the event loop must act."""
        while True:
            self._tracer.before_pass(self.core.version)
            finished = self.core.step()
            must_return = self._inbox or self._commands or self._cancelled or self._streams or self._is_closing
            if finished or must_return or not self.core.has_work:
                return finished

    async def _apply_commands(self) -> None:
        self._flush_inbox()
        while self._commands:
            command, future = self._commands.popleft()
            try:
                result = command()
                if asyncio.iscoroutine(result):
                    result = await result
            except _PartialLoadError as error:
                if not future.done():
                    future.set_exception(error)
                raise
            except Exception as error:  # the caller gets it, whatever it is
                if not future.done():
                    future.set_exception(error)
                else:
                    logger.exception("a command failed after its caller was cancelled")
            else:
                if not future.done():
                    future.set_result(result)
            self._flush_inbox()

    def _flush_inbox(self) -> None:
        for request in self._inbox:
            self.core.submit(request)
        self._inbox.clear()
        if self._cancelled:
            self._deliver(self.core.abort(self._cancelled))
            self._cancelled.clear()

    def _deliver(self, finished: list[EngineRequest]) -> None:
        for request in finished:
            assert request.state is RequestState.FINISHED, request.request_id
            ticket = self._tickets.pop(request.request_id)
            if request.failure is not None:
                _fail(ticket, request.failure)
            else:
                self.metrics.observe(request)
                if not ticket.future.done():
                    ticket.future.set_result(request)
            if ticket.events is not None:
                self._streams.discard(ticket)
                ticket.forward_tokens()
                ticket.events.put_nowait(None)

    def cancel(self, ticket: Ticket) -> None:
        """Abort a request whose caller has left, if it has not ended."""
        if self._tickets.get(ticket.request.request_id) is ticket:
            ticket.future.cancel()
            if ticket.request in self._held_requests:
                del self._held_requests[ticket.request]
                del self._tickets[ticket.request.request_id]
                self._streams.discard(ticket)
                return
            self._cancelled.append(ticket.request.request_id)
            self._wake.set()

    async def _between_steps(self, command: Callable[[], Any]) -> Any:
        """Run a function or coroutine function between two steps; returns its result."""
        if self.state is EngineState.FAILED:
            raise Refusal(FAILED, 503)
        future = asyncio.get_running_loop().create_future()
        self._commands.append((command, future))
        self._wake.set()
        return await future

    def _resolve_drained(self) -> None:
        for future in self._drain_waiters:
            if not future.done():
                future.set_result(None)
        self._drain_waiters.clear()

    def _fail_all(self, error: Exception) -> None:
        requests = (ticket.future for ticket in self._tickets.values())
        commands = (future for _, future in self._commands)
        for future in itertools.chain(requests, commands, self._drain_waiters):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: its caller may have left
        for ticket in self._tickets.values():
            if ticket.events is not None:
                ticket.events.put_nowait(None)
        self._tickets.clear()
        self._commands.clear()
        self._drain_waiters.clear()


def _fail(ticket: Ticket, cause: Exception) -> None:
    """Fail one request with its cause; the engine continues."""
    name = ticket.request.request_id
    logger.error("request %s failed", name, exc_info=cause)
    if not ticket.future.done():
        error = EngineError(f"request {name} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        ticket.future.set_exception(error)


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """Run an engine while the block runs, then close it."""
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        engine.close()
