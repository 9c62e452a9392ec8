"""The engine on an event loop: requests and admin calls come at any time and take effect between two steps.

    LOADING -> RUNNING <-> PAUSED         pause(keep), pause(abort), resume
               RUNNING -> DRAINING -> PAUSED   pause(wait); requests that come meanwhile are held until resume
               any -> FAILED               a step raised; every request fails, `run` raises, the process ends

One task, `run`, owns the core. It applies commands, makes a step, hands out what ended, and lets the loop
serve sockets. Steps are made in one thread of their own, so that /health and new requests are served
meanwhile. Measured on a 0.1M model: making them on the loop saves 12 % of the CPU time of a single stream and
nothing with 64 requests; with requests coming and going it costs 4 %, because newcomers join a step later. So
there is one way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stretto.base.errors import DataError, EngineError
from stretto.inference.embedded.core import EngineCore
from stretto.inference.embedded.metrics import Metrics
from stretto.inference.embedded.scheduler import Request, RequestState
from stretto.inference.text import Decode, Watcher
from stretto.models.lora import Adapter, load_adapter
from stretto.records.generate import GenerateRequest
from stretto.records.weights import WeightGroup, WeightManifest
from stretto.transports.engine.api import Refusal
from stretto.transports.weights import receive

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    LOADING = "loading"
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"
    FAILED = "failed"


class _HalfLoaded(EngineError):
    """Old and new weights are mixed: no token may be sampled from them, the engine must end."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted request: its future, and for a stream the queue of its tokens (None = the end)."""

    request: Request
    done: asyncio.Future[Request]
    watcher: Watcher | None = None
    events: asyncio.Queue[list[tuple[int, int, float]] | None] | None = None


class Engine:
    """Front of one EngineCore; all methods are called on the event loop."""

    def __init__(
        self, core: EngineCore, *, model_name: str = "model", max_waiting: int = 4096,
        decoder: Callable[[], Decode] | None = None,
    ) -> None:  # fmt: skip
        self.core, self.max_waiting, self.state = core, max_waiting, EngineState.RUNNING
        self.metrics = Metrics(model_name)
        self._decoder = decoder
        self._inbox: list[Request] = []
        self._cancelled: list[str] = []
        self._held: list[Request] = []
        self._tickets: dict[str, Ticket] = {}
        self._streams: set[Ticket] = set()
        self._commands: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._drained: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-step")

    def submit(self, asked: GenerateRequest, *, is_streamed: bool = False) -> Ticket:
        """Take a request in. Raises Refusal: 400 for what can never be served; 409, 429, 503 for not now."""
        if self.state is EngineState.FAILED:
            raise Refusal("the engine has failed; its log says why", 503)
        reason = self.core.refusal(asked)
        if reason is not None:
            raise Refusal(reason)
        if asked.request_id in self._tickets:
            raise Refusal(f"request_id: {asked.request_id!r} is in use by a request under way", 409)
        if self.num_waiting >= self.max_waiting:
            raise Refusal(
                f"{self.num_waiting} requests wait already (max_waiting_requests); try again later", 429
            )
        request = self.core.build_request(asked)
        stops = asked.sampling.stop
        watcher = None
        if stops or is_streamed:
            if stops and self._decoder is None:
                raise Refusal(
                    "stop: stop strings need a tokenizer, and this engine has none; use stop_token_ids"
                )
            watcher = Watcher(asked.n, stops, self._decoder() if stops else None, is_streamed=is_streamed)
            request.watcher = watcher
        ticket = Ticket(request, asyncio.get_running_loop().create_future(), watcher)
        self._tickets[asked.request_id] = ticket
        if is_streamed:
            ticket.events = asyncio.Queue()
            self._streams.add(ticket)
        (self._held if self.state is EngineState.DRAINING else self._inbox).append(request)
        self._wake.set()
        return ticket

    async def generate(self, asked: GenerateRequest) -> Request:
        """The finished request; a caller that is cancelled aborts it, which frees its blocks."""
        ticket = self.submit(asked)
        try:
            return await ticket.done
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise

    async def stream(self, ticket: Ticket) -> AsyncIterator[list[tuple[int, int, float]]]:
        """Lists of (sample, token, logprob) as they are drawn; then `ticket.done` has the result."""
        try:
            while (events := await ticket.events.get()) is not None:
                yield events
            await ticket.done
        finally:
            if not ticket.done.done():
                self._cancel(ticket)

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self._held) + len(self.core.scheduler.waiting)

    def metrics_page(self) -> str:
        """Prometheus text."""
        return self.metrics.render(self.core, len(self._inbox) + len(self._held))

    async def update(self, manifest: WeightManifest, group: WeightGroup | None = None) -> None:
        """Load new weights between two steps; requests under way go on under them.

        Raises: Refusal when they are another model's, WireError when they cannot be read; then nothing has
        changed.
        """
        reason = self.core.weights_refusal(manifest)
        if reason is not None:
            raise Refusal(reason)

        def load() -> None:
            device = self.core.cache.device
            with receive(manifest, group, device=device) as tensors:
                if (info := manifest.adapter) is not None:
                    copies = ((name, tensor.to(device, copy=True)) for name, tensor in tensors)
                    adapter = Adapter.from_tensors(copies, info.rank, info.scaling)
                    tensors.check_unchanged()
                    self.core.load_adapter(info.name, adapter, manifest.version)
                    return
                try:
                    self.core.load_weights(manifest.version, tensors)
                    tensors.check_unchanged()
                except Exception as error:
                    raise _HalfLoaded(f"version {manifest.version} was loaded in part: {error}") from error

        async def command() -> None:
            started = time.perf_counter()
            await asyncio.get_running_loop().run_in_executor(self._thread, load)
            took = time.perf_counter() - started
            self.metrics.num_updates += 1
            self.metrics.update_s += took
            running, waiting = self.core.scheduler.num_requests
            logger.info(
                "loaded version=%d in %.1f ms, running=%d waiting=%d",
                manifest.version,
                took * 1e3,
                running,
                waiting,
            )

        await self._between_steps(command)

    async def load_adapter(self, name: str, path: str, *, is_replacing: bool) -> None:
        """Serve the adapter in this directory of PEFT's under a name.

        Raises: Refusal when it is none of this model, or the name is taken and is_replacing is False.
        """

        async def command() -> None:
            if not is_replacing and self.core.adapters.get(name) is not None:
                raise Refusal(f"lora_name: {name!r} has been loaded already; load_inplace replaces it")
            try:
                adapter = await asyncio.get_running_loop().run_in_executor(self._thread, load_adapter, path)
                self.core.load_adapter(name, adapter, path=path)
            except DataError as error:
                raise Refusal(f"lora_path: {error}") from error
            logger.info("loaded adapter %s from %s", name, path)

        await self._between_steps(command)

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for it; those under way end with it. Raises: Refusal 404 for an unknown one."""

        async def command() -> None:
            if self.core.adapters.get(name) is None:
                raise Refusal(f"lora_name: no adapter is called {name!r}", 404)
            self.core.adapters.unload(name)
            logger.info("unloaded adapter %s", name)

        await self._between_steps(command)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop stepping; requests are kept as they are, waited for, or aborted."""

        async def command() -> asyncio.Future[None] | None:
            if mode == "abort":
                self._hand_out(self.core.abort())
            if mode == "wait" and self.core.has_work:
                self.state = EngineState.DRAINING
                drained = asyncio.get_running_loop().create_future()
                self._drained.append(drained)
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
        async def command() -> None:
            self.state = EngineState.RUNNING
            self._settle_drained()
            self._inbox.extend(self._held)
            self._held.clear()

        await self._between_steps(command)

    async def reset_prefix_cache(self) -> None:
        async def command() -> None:
            self.core.reset_prefix_cache()

        await self._between_steps(command)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End these requests (None: all) with what they have; finish_reason is "abort"."""
        ids = None if request_ids is None else list(request_ids)

        async def command() -> None:
            self._inbox.extend(self._held)  # held requests are aborted like all others
            self._held.clear()
            self._take_in()
            self._hand_out(self.core.abort(ids))

        await self._between_steps(command)

    async def run(self) -> None:
        """Step for ever; ends only by cancellation or by the exception of a step that failed."""
        try:
            while True:
                await self._apply_commands()
                if self.state is EngineState.PAUSED or not self.core.has_work:
                    if self.state is EngineState.DRAINING:
                        self.state = EngineState.PAUSED
                        self._settle_drained()
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

    def close(self) -> None:
        self._fail_all(EngineError("the engine is shutting down"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _step(self) -> None:
        finished = await asyncio.get_running_loop().run_in_executor(self._thread, self.core.step)
        for ticket in self._streams:
            if events := ticket.watcher.take_events():
                ticket.events.put_nowait(events)
        self._hand_out(finished)

    async def _apply_commands(self) -> None:
        self._take_in()
        while self._commands:
            command, future = self._commands.popleft()
            try:
                result = await command()
            except _HalfLoaded as error:
                if not future.done():
                    future.set_exception(error)
                raise
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
                else:
                    logger.exception("a command failed after its caller had left")
            else:
                if not future.done():
                    future.set_result(result)
            self._take_in()

    def _take_in(self) -> None:
        for request in self._inbox:
            self.core.submit(request)
        self._inbox.clear()
        if self._cancelled:
            self._hand_out(self.core.abort(self._cancelled))
            self._cancelled.clear()

    def _hand_out(self, finished: list[Request]) -> None:
        for request in finished:
            assert request.state is RequestState.FINISHED, request.request_id
            self.metrics.observe(request)
            ticket = self._tickets.pop(request.request_id)
            if not ticket.done.done():
                ticket.done.set_result(request)
            if ticket.events is not None:
                self._streams.discard(ticket)
                if events := ticket.watcher.take_events():
                    ticket.events.put_nowait(events)
                ticket.events.put_nowait(None)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.request.request_id in self._tickets:
            ticket.done.cancel()
            if ticket.request in self._held:
                self._held.remove(ticket.request)
                del self._tickets[ticket.request.request_id]
                self._streams.discard(ticket)
                return
            self._cancelled.append(ticket.request.request_id)
            self._wake.set()

    async def _between_steps(self, command: Callable[[], Awaitable[Any]]) -> Any:
        if self.state is EngineState.FAILED:
            raise Refusal("the engine has failed; its log says why", 503)
        future = asyncio.get_running_loop().create_future()
        self._commands.append((command, future))
        self._wake.set()
        return await future

    def _settle_drained(self) -> None:
        for future in self._drained:
            if not future.done():
                future.set_result(None)
        self._drained.clear()

    def _fail_all(self, error: Exception) -> None:
        for ticket in self._tickets.values():
            if not ticket.done.done():
                ticket.done.set_exception(error)
                ticket.done.exception()  # its reader may have left: not an error of its own
            if ticket.events is not None:
                ticket.events.put_nowait(None)
        for _, future in self._commands:
            if not future.done():
                future.set_exception(error)
        for future in self._drained:
            if not future.done():
                future.set_exception(error)
        self._tickets.clear()
        self._commands.clear()
        self._drained.clear()


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """Run an engine for the length of a block."""
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        engine.close()
