"""Weight updates that vLLM's server runs by itself: its workers receive while they decode, and stop for the copy alone.

    RECEIVING    a thread of each worker receives and verifies; steps go on     -> STOPPED; SERVING if that fails, or if
                                                                                   START_UPDATE begins another update
    STOPPED      the scheduler is paused, requests keep their caches            -> LOADING; SERVING if bytes changed
    LOADING      workers load                                                   -> SERVING; stays paused if that fails

A call of UPDATE_WEIGHTS alone is such an update. Between START_UPDATE and FINISH_UPDATE the caller has paused the
engine, and the same call is vLLM's own: workers receive and load while nothing else runs. Engines whose ranks on
several nodes compute each step together get all five calls, because every node has a server, and all have to stop
before one loads; so do engines that sleep, which have nothing to decode meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from stretto.base.errors import EngineError, WireError
from stretto.inference.update_order import UpdateOrder, UpdateState
from stretto_vllm.patches.caches import policy_salt, with_load

logger = logging.getLogger("vllm.stretto")
"""Beside vLLM's own lines: its server writes no others."""

POLL_S = 0.005
MAX_POLL_S = 0.05


def loads_between_steps(config: Any) -> bool:
    """Whether UPDATE_WEIGHTS alone is an update of this engine. config: vLLM's."""
    is_wide = config.parallel_config.local_engines_only and config.model_config.is_moe
    return not is_wide and not config.model_config.enable_sleep_mode


class Updates:
    """The updates of one engine, one at a time."""

    def __init__(self, client: Any) -> None:
        """client: vLLM's AsyncLLM."""
        self._client = client
        self._lock = asyncio.Lock()
        self._noted: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._loading: asyncio.Task[Any] | None = None
        self._num_started = 0
        """Updates that START_UPDATE has begun; each ends those that are receiving."""
        self.is_receiving = False
        """Whether workers answer although an update runs."""
        self.salt: str | None = None
        """It names the weights with which new requests are computed: those that are loaded, or being loaded.

        vLLM keeps what it has cached of others, because requests run on with it.
        """
        self._loads: Counter[str] = Counter()
        """How often an adapter of a name was loaded."""
        core = client.engine_core
        add, add_adapter = core.add_request_async, core.add_lora_async

        async def add_salted(request: Any) -> None:
            if request.cache_salt is None:
                request.cache_salt = self.salt
            if request.lora_request is not None:
                request.cache_salt = with_load(request.cache_salt, self._loads[request.lora_request.lora_name])
            await add(request)

        async def add_counted(adapter: Any) -> Any:
            self._loads[adapter.lora_name] += 1  # what is sent from here on, the engine gets after this
            return await add_adapter(adapter)

        core.add_request_async, core.add_lora_async = add_salted, add_counted  # those of all routes

    async def start(self, order: UpdateOrder) -> None:
        """START_UPDATE: an earlier update gives its version up, or loads it to the end; its caller may have left it."""
        self._num_started += 1
        await self._call("stretto_drop_arrival")
        async with self._lock:
            # The earlier update may have resumed the engine.
            await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            order.state = UpdateState.STARTED
            await self._call("stretto_start_update")

    async def until_loaded(self) -> None:
        """Wait while workers load: a pause counts from then on, and is not ended with that of the update."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    async def load_paused(self, info: dict[str, Any]) -> None:
        """Load a version between START_UPDATE and FINISH_UPDATE."""
        await self._note(info["manifest"])
        await self._call("update_weights", info)

    async def _note(self, manifest: Mapping[str, Any]) -> None:
        """A version is being loaded: salt requests anew that are not begun, and say once what it does not change.

        The engine is paused, and runs again with this version or a later one only.
        """
        drafts = self._client.vllm_config.speculative_config
        if self.salt is None and drafts is not None and drafts.use_eagle():
            logger.info(
                "the layers that draft (%s) keep the weights with which this engine was started: no trainer has them. "
                "Where they share the model's embedding and output head, these follow",
                drafts.method,
            )
        self.salt = policy_salt(manifest)
        await self._client.engine_core.call_utility_all_async("stretto_salt", self.salt)

    async def load(self, info: dict[str, Any], order: UpdateOrder) -> None:
        """Load a version; it goes on if the caller leaves. info: an UpdateInfo as JSON.

        Raises: WireError if it cannot be received: the engine goes on with the weights that it has. EngineError if it
        was loaded in part: the engine stays paused.
        """
        task = asyncio.create_task(self._load(info, order))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def _load(self, info: dict[str, Any], order: UpdateOrder) -> None:
        version, number = info["manifest"]["version"], self._num_started
        async with self._lock:
            started = time.perf_counter()
            await self._receive(info, number)
            stopped = time.perf_counter()
            async with self._paused(order):
                await self._check_arrival(number)
                order.state = UpdateState.STARTED
                await self._note(info["manifest"])
                try:
                    await self._call("stretto_load", info)
                    await self._client.update_weight_version(str(version))
                except Exception as error:  # of vLLM and its workers, of any kind
                    raise EngineError(
                        f"version {version} was loaded in part: {error}; the engine stays paused until a whole update"
                    ) from error
            now = time.perf_counter()
        message = "loaded version=%d in %.1f ms; the engine stood still for %.1f ms of them"
        logger.info(message, version, (now - started) * 1e3, (now - stopped) * 1e3)

    async def _receive(self, info: dict[str, Any], number: int) -> None:
        """Have all workers receive a version, unless one of them cannot while it decodes.

        number: updates that had been started when this one came. Raises: WireError if a worker fails.
        """
        self.is_receiving = True
        try:
            self._check_is_last(number)
            # All are asked before one begins: it would wait for those that receive when the engine stands still.
            reasons = set(await self._call("stretto_reason_to_stop", info)) - {None}
            for reason in sorted(reasons - self._noted):
                logger.warning("weights are received while the engine stands still: %s", reason)
            self._noted |= reasons
            if reasons:
                return
            self._check_is_last(number)
            await self._call("stretto_receive", info)
            wait_s = POLL_S
            while not all(await self._call("stretto_has_arrived")):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_POLL_S)
        except Exception as error:  # of vLLM and its workers, of any kind
            raise WireError(f"{error}") from error
        finally:
            self.is_receiving = False
        await self._check_arrival(number)

    def _check_is_last(self, number: int) -> None:
        """Raises: WireError if START_UPDATE has begun another update meanwhile."""
        if number != self._num_started:
            raise WireError("another update has been started; this one was given up")

    async def _check_arrival(self, number: int) -> None:
        """Raises: WireError if a worker could not receive the version, or if its bytes have changed since."""
        try:
            self._check_is_last(number)
            await self._call("stretto_check_arrival")
        except Exception as error:  # of vLLM and its workers, of any kind
            with contextlib.suppress(Exception):  # of an engine that is dead
                await self._call("stretto_drop_arrival")
            raise WireError(f"{error}") from error

    @contextlib.asynccontextmanager
    async def _paused(self, order: UpdateOrder) -> AsyncIterator[None]:
        """Pause the scheduler, and resume it unless an update is left unfinished, or it was paused before."""
        before, self._loading = order.state, asyncio.current_task()
        # Not pause_generation: it waits for 20 ms after that, so that callers see all tokens first.
        try:
            await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            yield
        except EngineError:
            raise
        except BaseException:
            await self._resume(before, order)
            raise
        else:
            await self._resume(before, order)
        finally:
            self._loading = None

    async def _resume(self, before: UpdateState, order: UpdateOrder) -> None:
        order.state = before
        if before is UpdateState.SERVING:
            await self._client.resume_generation()

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; what each returns."""
        core = self._client.engine_core
        answers = await core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for of_engine in answers for answer in of_engine]
