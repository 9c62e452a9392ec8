"""Samples for users from the engines: each version of an adapter is loaded under a name of its own when it is needed.

An engine has room for some adapters. `AdapterSlots` loads the version that a request needs and unloads the one that was
unused for longest, never one in use; if all are in use, they take turns. The name of a version is also the cache salt
of its requests, so that users and versions share no cached prefix. Whole weights, of a service that trains all of
them, are loaded one version at a time (`WeightSlot`). Requests of users take turns at the engines
(scheduler.SlotQueue).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stretto.base.errors import DataError, EngineError
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.weight_manifest import load_manifest
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.client import EngineClient
from stretto.transports.engine.http import RequestRefused
from stretto_service.access import User
from stretto_service.store import Sampler
from stretto_service.training.scheduler import SlotQueue
from stretto_service.usage import Meter

logger = logging.getLogger(__name__)

ATTEMPTS = 4
RECOVERY_S = 300.0
"""Longest wait for an engine that was restarted."""
TURN_S = 1.0
"""How long an adapter in use may stay while others wait for room."""


@dataclass(eq=False)
class _Loaded:
    """An adapter in the engines. ready: done once they have it; since: start of its load, monotonic seconds."""

    ready: asyncio.Future[None]
    num_users: int = 0
    since: float = field(default_factory=time.monotonic)
    is_leaving: bool = False
    """Others need its room, so it gets no new users."""
    is_stale: bool = False
    """An engine may have lost it, so it is unloaded before it is used again."""


class AdapterSlots:
    """The adapters that are loaded in all engines.

    Requests that need room wait in order of arrival. If all adapters are in use, the one that was loaded first has to
    leave after `TURN_S`: it gets no new users, and makes room when its users are done.
    """

    def __init__(self, client: EngineClient, max_adapters: int) -> None:
        self._client, self._max = client, max_adapters
        self._loaded: dict[str, _Loaded] = {}  # in order of last use
        self._generation = -1
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()  # held by the request that makes room
        self._loads: set[asyncio.Task[None]] = set()
        self.num_loads = self.num_hits = 0

    @asynccontextmanager
    async def use(self, name: str, directory: str) -> AsyncIterator[None]:
        """Keep an adapter loaded inside this context; after an engine's error the next user loads it again."""
        entry = await self._enter(name, directory)
        try:
            yield
        except EngineError as error:
            entry.is_stale |= not isinstance(error, RequestRefused)
            raise
        finally:
            entry.num_users -= 1
            self._freed.set()

    async def _enter(self, name: str, directory: str) -> _Loaded:
        if self._client.generation != self._generation:
            await self._reset()
        if (entry := self._find(name)) is not None:
            self.num_hits += 1
            return await self._join(name, entry)
        async with self._turn:
            if (entry := self._find(name)) is not None:
                self.num_hits += 1
            else:
                await self._make_room(name)
                entry = self._loaded[name] = _Loaded(asyncio.get_running_loop().create_future())
                self.num_loads += 1
                # A task of its own: if this request is cancelled, engines continue to load, which takes room.
                task = asyncio.create_task(self._load(name, directory, entry))
                self._loads.add(task)
                task.add_done_callback(self._loads.discard)
        return await self._join(name, entry)

    async def _load(self, name: str, directory: str, entry: _Loaded) -> None:
        try:
            await self._load_everywhere(name, directory)
            entry.ready.set_result(None)
        except BaseException as error:
            try:
                with suppress(EngineError):  # the first error is reported
                    # From engines that have it although another failed.
                    await self._client.unload_adapter(name)
            finally:
                if self._loaded.get(name) is entry:
                    del self._loaded[name]
                if isinstance(error, Exception) and not isinstance(error, EngineError):
                    logger.error("%s is not loaded", name, exc_info=error)
                entry.ready.set_exception(error if isinstance(error, EngineError) else EngineError(str(error)))
                entry.ready.exception()  # so that asyncio does not warn if nothing waits for it
            if not isinstance(error, Exception):
                raise
        finally:
            self._freed.set()

    async def _load_everywhere(self, name: str, directory: str) -> None:
        """Load it on all engines that are up; one that comes back meanwhile gets it too."""
        generation = None
        while generation != self._client.generation:
            generation = self._client.generation
            await self._client.load_adapter(name, directory)

    def _find(self, name: str) -> _Loaded | None:
        """The adapter if new users may join it."""
        entry = self._loaded.get(name)
        return None if entry is None or entry.is_leaving or entry.is_stale else entry

    async def _join(self, name: str, entry: _Loaded) -> _Loaded:
        self._loaded[name] = self._loaded.pop(name)
        entry.num_users += 1
        try:
            await asyncio.shield(entry.ready)
        except BaseException:
            entry.num_users -= 1
            self._freed.set()
            raise
        return entry

    async def _make_room(self, name: str) -> None:
        """Wait until one more adapter may be loaded and none of this name is loaded; unloads an idle one."""
        try:
            while len(self._loaded) >= self._max or name in self._loaded:
                self._freed.clear()
                candidates = [name] if name in self._loaded else list(self._loaded)
                idle = next((each for each in candidates if _is_idle(self._loaded[each])), None)
                if idle is not None:
                    del self._loaded[idle]
                    await self._unload(idle)
                    continue
                wait_s = None
                if name not in self._loaded:
                    first = min(self._loaded.values(), key=lambda entry: entry.since)
                    wait_s = first.since + TURN_S - time.monotonic()
                    if wait_s <= 0:
                        first.is_leaving, wait_s = True, None
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._freed.wait()
        finally:
            for entry in self._loaded.values():
                entry.is_leaving = False

    async def _reset(self) -> None:
        """Unload everything, after an engine or this hub was restarted and it is unknown what is loaded."""
        self._generation = self._client.generation
        self._loaded.clear()
        self._freed.set()
        try:
            names = await self._client.adapters()
        except EngineError:
            self._generation = -1  # it is still unknown what is loaded
            raise
        for name in names:
            if name not in self._loaded:
                await self._unload(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._client.unload_adapter(name)
        except EngineError as error:
            logger.warning("%s was not unloaded: %s", name, error)


def _is_idle(entry: _Loaded) -> bool:
    """Whether it has no users and is not being loaded."""
    return not entry.num_users and entry.ready.done()


class WeightSlot:
    """The whole weights that all engines have: one version at a time, or the model's own.

    Requests for the loaded version run together. One for another version waits until they are done, and later requests
    wait behind it.
    """

    def __init__(self, client: EngineClient, base: Path, folder: Path) -> None:
        """base: directory of the model's own weights; folder: holds links to the files that engines have loaded."""
        self.base = base
        self._client, self._folder = client, folder
        self._name: str | None = None  # of the loaded version; None: unknown
        self._num_users = self._version = 0
        self._idle = asyncio.Event()
        self._turn = asyncio.Lock()
        self.num_loads = self.num_hits = 0

    @asynccontextmanager
    async def use(self, name: str, directory: str) -> AsyncIterator[None]:
        """Keep a version loaded inside this context; after an engine's error the next user loads it again."""
        async with self._turn:
            if name == self._name:
                self.num_hits += 1
            else:
                while self._num_users:
                    self._idle.clear()
                    await self._idle.wait()
                await self._load(name, Path(directory))
            self._num_users += 1
        try:
            yield
        except EngineError as error:
            if not isinstance(error, RequestRefused):
                self._name = None
            raise
        finally:
            self._num_users -= 1
            self._idle.set()

    def check(self, completions: Sequence[Completion]) -> None:
        """Check that engines sampled from the loaded version.

        Raises: EngineError if not: an engine was restarted, with the model's own weights, before that was noticed.
        """
        versions = {span.version for completion in completions for span in completion.versions}
        if versions - {self._version}:
            raise EngineError(f"an engine has version {min(versions)} of the weights, not {self._version}")

    async def _load(self, name: str, directory: Path) -> None:
        """Load a version on all engines. Raises: EngineError if its files are gone, or no engine loads them."""
        self._name, self._version = None, self._version + 1
        # A restarted engine gets these files again, even if their checkpoint was deleted meanwhile.
        place = self._folder / str(time.time_ns())
        try:
            shutil.copytree(directory, place, copy_function=os.link)
            manifest = load_manifest(place)
        except (OSError, shutil.Error, DataError) as error:
            raise EngineError(f"{name}: these weights cannot be read: {error}") from error
        manifest = msgspec.structs.replace(manifest, version=self._version, location=str(place.resolve()))
        await self._client.update_weights(manifest)
        self._name = name
        self.num_loads += 1
        for old in self._folder.iterdir():
            if old != place:
                shutil.rmtree(old, ignore_errors=True)


class Engines:
    """Samples for all users."""

    def __init__(
        self,
        client: EngineClient,
        meter: Meter,
        *,
        max_adapters: int,
        max_samples: int,
        max_waiting: int,
        whole: WeightSlot | None = None,
    ) -> None:
        """whole: for a service that trains all weights; None: runs have adapters."""
        self.client, self._meter = client, meter
        self.slots = whole or AdapterSlots(client, max_adapters)
        self._base = None if whole is None else str(whole.base)
        self.queue = SlotQueue(max_samples)
        self._max_waiting = max_waiting
        self._uses: Counter[str] = Counter()
        self.num_tokens = 0

    def check_room(self, user: User) -> None:
        """Raises: Refusal 429 if this user has too many requests waiting."""
        self._admit(user)
        if self.queue.waiting(user.name) >= self._max_waiting:
            raise Refusal(f"{self._max_waiting} of your requests are waiting already; send this later", 429)

    async def generate(
        self, user: User, sampler: Sampler, request: GenerateRequest, *, on_start: Callable[[], None] = lambda: None
    ) -> Sequence[Completion]:
        """Wait for a slot of this user, call on_start, and return the samples. Raises: EngineError."""
        self._admit(user)
        request = msgspec.structs.replace(request, cache_salt=hash_salt(request.cache_salt))
        directory = sampler.directory or ""
        self._uses[directory] += 1
        try:
            completions = await self._in_turn(user, sampler, request, on_start)
            self._count(user, sampler, request, completions)
            return completions
        finally:
            self._uses[directory] -= 1
            if not self._uses[directory]:
                del self._uses[directory]
            sampler.used_at = time.time()

    def is_used(self, directory: str) -> bool:
        """Whether a request for samples from these weights is waiting or running."""
        return self._uses[directory] > 0

    async def _in_turn(
        self, user: User, sampler: Sampler, request: GenerateRequest, on_start: Callable[[], None]
    ) -> Sequence[Completion]:
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.queue.push(user.name, turn, size=request.n)
        self._start_next()
        try:
            size = await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._release(user.name, turn.result())
            else:
                self.queue.drop(user.name, turn)
            raise
        try:
            on_start()
            return await self._generate(sampler, request)
        finally:
            self._release(user.name, size)

    async def _generate(self, sampler: Sampler, request: GenerateRequest) -> Sequence[Completion]:
        directory = sampler.directory or self._base
        if directory is None:
            return await self.client.generate(request)
        name = request.adapter
        if self._base is not None:  # the version is the engines' own model
            name, request = name or "base", msgspec.structs.replace(request, adapter=None)
        assert name is not None, f"{request.request_id} names no adapter"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self.slots.use(name, directory):
                    completions = await self.client.generate(request)
                    if isinstance(self.slots, WeightSlot):
                        self.slots.check(completions)
                    return completions
            except RequestRefused as error:
                raise Refusal(str(error)) from None
            except EngineError as error:
                # A restarted engine has lost the adapter; a dead one comes back.
                if attempt == ATTEMPTS or not Path(directory).is_dir():
                    raise
                logger.info("%s: %s; trying again", name, error)
                await asyncio.sleep(attempt)
                await self.client.wait_ready(RECOVERY_S)
        raise AssertionError("the last attempt returns or raises")

    def _count(self, user: User, sampler: Sampler, request: GenerateRequest, completions: Sequence[Completion]) -> None:
        num_sampled = sum(len(completion.token_ids) for completion in completions)
        self.num_tokens += num_sampled
        num_cached = completions[0].cached_tokens
        num_read = len(request.prompt_ids) - num_cached
        self._meter.add(user.name, sampler.session, prefill=num_read, cached=num_cached, sampled=num_sampled)

    def _admit(self, user: User) -> None:
        self.queue.add(user.name, weight=user.section.weight, max_running=user.section.max_samples)

    def _release(self, user: str, size: int) -> None:
        self.queue.release(user, size)
        self._start_next()

    def _start_next(self) -> None:
        while (item := self.queue.pop()) is not None:
            name, turn, size = item
            if turn.cancelled():
                self.queue.release(name, size)
            else:
                turn.set_result(size)


def hash_salt(salt: str | None) -> str | None:
    """A salt of 64 hexadecimal digits, because vLLM refuses long ones and those with a slash or an `@`."""
    return None if salt is None else hashlib.sha256(salt.encode()).hexdigest()


def adapter_name(sampler: Sampler) -> str:
    """The name of this version in engines; a version that was saved again in the same place has another one.

    Raises: Refusal 404 if it was deleted.
    """
    assert sampler.directory is not None, f"{sampler.id} has no adapter"
    run, _, version = sampler.directory.rsplit("/", 3)[-3:]
    try:
        saved_at = os.stat(sampler.directory).st_mtime_ns
    except OSError:
        raise Refusal(f"{run}/{version}: these weights were deleted", 404) from None
    return f"{run}/{version}@{saved_at}"


def request_of_sampler(request: GenerateRequest, sampler: Sampler, name: str) -> GenerateRequest:
    """A run's request as engines get it: its id, the adapter, and a cache salt that no other version or user has."""
    adapter = None if sampler.directory is None else adapter_name(sampler)
    salt = f"{adapter or f'user {sampler.owner}'} {request.cache_salt or ''}"
    return msgspec.structs.replace(request, request_id=name, adapter=adapter, cache_salt=salt)
