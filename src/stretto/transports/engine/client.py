"""The orchestrator's side of the engine's HTTP API: generate on one engine, admin calls to all of them.

A rollout's turns carry a session id and go to the engine it hashes to, where their prefix is cached; requests
without one go to the engine with the fewest under way. Only infrastructure is retried (connection refused or
cut, 5xx, 429, 409), elsewhere if there is another engine, within the deadline; any other 4xx is our own
mistake and raises with the server's words.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import numpy as np

from stretto.base.errors import EngineError
from stretto.base.limits import raise_file_limit
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.weights import WeightGroup, WeightManifest
from stretto.transports.engine import api
from stretto.transports.engine.fleet import EngineState, Fleet

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_POLL_S = 0.05
_ROUTER_TIMEOUT_S = 120.0
_UNAVAILABLE_S = 0.5
_TRY_AGAIN = (409, 429)  # 409: the engine has not yet noticed that this request's last connection is gone
_HEADERS = {"Content-Type": "application/json"}


class _Transient(Exception):
    """An attempt failed for reasons of infrastructure; worth another."""


class _Unavailable(_Transient):
    """Nobody is there at the moment: worth waiting for, and no attempt lost."""


class EngineClient:
    """All engines of a run. `urls` may end in /v1; `admin_urls` are the engines behind a router."""

    def __init__(
        self, urls: Iterable[str], admin_urls: Iterable[str] | None = None, api_key: str | None = None, *,
        timeout_s: float = 600.0, max_retries: int = 3, model: str | None = None,
        liveness_interval_s: float = 5.0, liveness_timeout_s: float = 30.0, recovery_timeout_s: float = 600.0,
        on_down: Callable[[str, str], None] = lambda url, reason: None,
    ) -> None:  # fmt: skip
        self.urls = [_root(url) for url in urls]
        self.admin_urls = [_root(url) for url in admin_urls] if admin_urls is not None else self.urls
        self.timeout_s, self.max_retries, self.model = timeout_s, max_retries, model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._is_routed = self.urls != self.admin_urls
        self._under_way = dict.fromkeys(self.urls, 0)
        self._session: aiohttp.ClientSession | None = None
        self._manifest: WeightManifest | None = None
        self._world_sizes: dict[str, int] = {}
        self._failed_once: set[str] = set()  # alive, and did not load the newest version the first time
        self._liveness_timeout_s = liveness_timeout_s
        self.fleet = Fleet(
            self.admin_urls,
            check=self._check_alive,
            restore=self._restore,
            interval_s=liveness_interval_s,
            recovery_timeout_s=recovery_timeout_s,
            on_down=on_down,
        )

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The request's n samples. Raises EngineError; cancelling it aborts the request on the engine."""
        body = api.encode_generate(request, self.model)
        headers = (
            _HEADERS if request.session_id is None else {**_HEADERS, api.SESSION_HEADER: request.session_id}
        )
        what = f"generate {request.request_id}"
        try:
            async with asyncio.timeout(self.timeout_s):
                data = await self._generate(what, body, headers, request.session_id)
        except TimeoutError:
            raise EngineError(
                f"{what}: no answer from {', '.join(self.urls)} in {self.timeout_s:g} s"
            ) from None
        return api.decode_completions(request, data)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when every engine is healthy. Raises EngineError naming those that are not."""
        # Not the router: it is ready when an engine is let in, and engines are when they were given weights.
        waiting = dict.fromkeys(self.admin_urls, "no answer yet")

        async def poll(url: str) -> None:
            while True:
                try:
                    await self._once("GET", url + api.HEALTH)
                    del waiting[url]
                    return
                except _Transient as error:
                    waiting[url] = str(error)
                    await asyncio.sleep(_POLL_S)

        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(poll(url) for url in list(waiting)))
        except TimeoutError:
            who = "; ".join(f"{url}: {why}" for url, why in waiting.items())
            raise EngineError(f"not ready after {timeout_s:g} s: {who}") from None

    async def update_weights(self, manifest: WeightManifest) -> None:
        """Return when every engine that is up samples from this version.

        Requests under way are kept, with their cache, and go on under the new weights. An engine that does not
        load it is down until it does. Raises: EngineError when the last one is, and none comes back in time.
        """
        left: list[str] = []
        while True:
            await self.fleet.wait_for_one()  # outside of the lock, which an engine that comes back takes
            async with self.fleet.updating:
                # One that came back a moment ago holds the version before; one that comes later gets this one.
                self._manifest = manifest
                failures = await self._load_all(left or self.fleet.ready())
            # Of engines that receive together, one that dies fails the others: those that live try again.
            left = []
            for url, error in failures.items():
                if url in self._failed_once or await self._is_dead(url):
                    await self.fleet.mark_down(url, error)
                    self._failed_once.discard(url)
                else:
                    self._failed_once.add(url)
                    left.append(url)
            if not left and self.fleet.ready():
                break
        if self._is_routed:
            await self._wait_for_router()

    async def _load_all(self, urls: list[str]) -> dict[str, str]:
        """Load the newest version on these engines together; what went wrong, by engine."""
        groups = await self._groups(urls)
        loads = (self._load(url, group) for url, group in zip(urls, groups))
        results = await asyncio.gather(*loads, return_exceptions=True)
        failures: dict[str, str] = {}
        for url, result in zip(urls, results):
            if isinstance(result, EngineError) and len(self.admin_urls) > 1:
                failures[url] = str(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                self._failed_once.discard(url)
        return failures

    async def _is_dead(self, url: str) -> bool:
        try:
            await self._check_alive(url)
        except EngineError:
            return True
        return False

    @property
    def num_ready(self) -> int:
        """Engines that are up."""
        return len(self.fleet.ready())

    async def watch(self) -> None:
        """Notice engines that die or hang, and let them in again; runs for ever beside everything else."""
        await self.fleet.watch()

    async def _check_alive(self, url: str) -> None:
        try:
            async with asyncio.timeout(self._liveness_timeout_s):
                await self._once("GET", url + api.LIVENESS)
        except TimeoutError:
            raise EngineError(f"{url}{api.LIVENESS}: no answer in {self._liveness_timeout_s:g} s") from None
        except _Transient as error:
            raise EngineError(str(error)) from error

    async def _restore(self, url: str) -> None:
        """Give an engine that comes back the newest version."""
        if self._manifest is not None:
            [group] = await self._groups([url])
            await self._load(url, group)

    async def _groups(self, urls: list[str]) -> list[WeightGroup | None]:
        """Who receives the newest version as which rank, where the transport sends to all at once."""
        assert self._manifest is not None
        if not self._manifest.needs_group:
            return [None] * len(urls)
        for url in urls:
            if url not in self._world_sizes:
                self._world_sizes[url] = api.decode_world_size(
                    await self._admin(url, api.WORLD_SIZE, method="GET")
                )
        sizes = [self._world_sizes[url] for url in urls]
        request, total = uuid4().hex, sum(sizes)
        # After a failure nobody can say what is left of a group.
        salt = request if self._failed_once else str(self.fleet.generation)
        epoch = f"{salt}-{zlib.crc32(' '.join(urls).encode()):08x}"
        firsts = itertools.accumulate(sizes[:-1], initial=0)
        return [WeightGroup(epoch=epoch, request=request, world_size=total, rank=rank) for rank in firsts]

    async def _load(self, url: str, group: WeightGroup | None) -> None:
        """Load the newest version; an engine where a step fails stays paused: what it holds is no version."""
        manifest = self._manifest
        assert manifest is not None
        await self._admin(url, f"{api.PAUSE}?mode=keep&clear_cache=false")
        await self._admin(url, api.START_UPDATE)
        await self._admin(url, api.UPDATE_WEIGHTS, api.encode_update(manifest, group))
        await self._admin(url, api.FINISH_UPDATE, api.encode_finish(manifest.version))
        await self._admin(url, api.RESUME)

    async def _wait_for_router(self) -> None:
        """Return when the router has let an engine in."""
        deadline = time.monotonic() + _ROUTER_TIMEOUT_S
        for url in self.urls:
            while True:
                try:
                    await self._once("GET", url + api.READINESS)
                    break
                except _Transient as error:
                    if time.monotonic() > deadline:
                        raise EngineError(f"the router lets no engine in: {error}") from error
                await asyncio.sleep(_POLL_S)

    async def prompt_logprobs(self, token_ids: np.ndarray, name: str) -> dict[str, np.ndarray]:
        """What every engine gives these tokens, float32 [tokens] in nats by address; the first is 0.

        `name` is the request's, and its salt: no cache of other weights answers.
        """
        request = GenerateRequest(
            request_id=name,
            prompt_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
            cache_salt=name,
            prompt_logprobs=True,
        )
        body = api.encode_generate(request, self.model)

        async def score(url: str) -> np.ndarray:
            answer = await self._admin(url, api.GENERATE, body)
            scores = api.decode_completions(request, answer)[0].prompt_logprobs
            if scores is None or len(scores) != len(token_ids):
                raise EngineError(f"{url} gave no log-probabilities of a prompt's {len(token_ids)} tokens")
            return scores

        ready = self.fleet.ready()
        return dict(zip(ready, await _all_of(score(url) for url in ready)))

    async def pause(self, mode: str = "abort") -> None:
        """Stop stepping: keep requests for `resume`, wait until they are done, or abort them."""
        await self._all("POST", f"{api.PAUSE}?mode={mode}")

    async def resume(self) -> None:
        await self._all("POST", api.RESUME)

    async def reset_prefix_cache(self) -> None:
        await self._all("POST", api.RESET_PREFIX_CACHE)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End these requests (None: all) with what they have."""
        ids = None if request_ids is None else list(request_ids)
        await self._all("POST", api.ABORT, msgspec.json.encode({"request_ids": ids}))

    async def load_adapter(self, name: str, path: str, *, is_replacing: bool = False) -> None:
        """Have every engine serve the adapter in this directory, which its host sees, under a name.

        Raises: EngineError with the engine's reason, also for a name that is taken unless is_replacing.
        """
        body = api.LoadAdapterBody(name, path, load_inplace=is_replacing)
        await self._all("POST", api.LOAD_ADAPTER, msgspec.json.encode(body))

    async def unload_adapter(self, name: str) -> None:
        """No more requests for it; those under way end with it."""
        await self._all("POST", api.UNLOAD_ADAPTER, msgspec.json.encode({"lora_name": name}))

    async def metrics(self) -> dict[str, float]:
        """The engines' metrics summed over engines and labels, by name (histograms: _sum and _count)."""
        total: dict[str, float] = {}
        for text in await self._all("GET", api.METRICS):
            for line in text.decode().splitlines():
                if not line.startswith("#") and "_bucket" not in line:
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    total[name] = total.get(name, 0.0) + float(value)
        return total

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _generate(
        self, what: str, body: bytes, headers: dict[str, str], session_id: str | None
    ) -> bytes:
        attempt = 0
        while True:
            url = self._choose(session_id, attempt)
            try:
                return await self._attempt(url, body, headers)
            except _Unavailable as error:
                logger.info("%s: %s; waiting", what, error)
                await asyncio.sleep(_UNAVAILABLE_S)
                await self.fleet.wait_for_one()
                continue
            except _Transient as error:
                if attempt >= self.max_retries:
                    raise EngineError(f"{what}: {error} (after {attempt + 1} attempts)") from error
                logger.warning("%s: %s; trying again", what, error)
            await asyncio.sleep(min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S))
            attempt += 1
            await self.fleet.wait_for_one()

    async def _attempt(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        """One try on one engine; cut when that engine goes down."""
        self._under_way[url] += 1
        member = self.fleet.members.get(url)
        try:
            if member is None or len(self.admin_urls) == 1:
                return await self._once("POST", url + api.GENERATE, body, headers)
            task = asyncio.ensure_future(self._once("POST", url + api.GENERATE, body, headers))
            member.requests.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if member.state is EngineState.DOWN and not _is_cancelled():
                    raise _Transient(f"{url} went down: {member.reason}") from None
                task.cancel()
                raise
            finally:
                member.requests.discard(task)
        finally:
            self._under_way[url] -= 1

    def _choose(self, session_id: str | None, attempt: int) -> str:
        """The router, or an engine that is up: the session's, else the one with the fewest requests."""
        if len(self.urls) == 1:
            return self.urls[0]
        ready = self.urls if self._is_routed else (self.fleet.ready() or self.urls)
        if session_id is None:
            return min(ready, key=self._under_way.__getitem__)
        return ready[(zlib.crc32(session_id.encode()) + attempt) % len(ready)]

    async def _all(self, method: str, path: str, body: bytes | None = None) -> list[bytes]:
        """The same call to every engine; fails when one fails, after all have answered."""
        return await _all_of(self._admin(url, path, body, method) for url in self.fleet.ready())

    async def _admin(self, url: str, path: str, body: bytes | None = None, method: str = "POST") -> bytes:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._once(method, url + path, body, _HEADERS)
        except TimeoutError:
            raise EngineError(f"{url}{path}: no answer in {self.timeout_s:g} s") from None
        except _Transient as error:
            raise EngineError(str(error)) from error

    async def _once(
        self, method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        session = self._open()
        try:
            async with session.request(method, url, data=body, headers=headers) as response:
                data = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _Transient(f"{url}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return data
        message = f"{url}: HTTP {response.status}: {api.error_message(data)}"
        if response.status == 503:
            raise _Unavailable(message)
        if response.status in _TRY_AGAIN or response.status >= 500:
            raise _Transient(message)
        raise EngineError(message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise_file_limit()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return self._session

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()


async def _all_of(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What all of them return; the first failure is raised when all have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _is_cancelled() -> bool:
    """Was this task itself cancelled, rather than what it waits for?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
