"""Client of the engine's HTTP API, in the orchestrator: generate on one engine, admin calls to all engines.

dispatch.py chooses the engine of a request and tries again; fleet.py knows which engines are up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import numpy as np

from stretto.base.aio import task_group
from stretto.base.errors import EngineError
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.partial import ABORTED, continued_request, empty_completions, merge_completions, needs_whole_reply
from stretto.records.weight_manifest import CanaryImage, WeightGroup, WeightManifest
from stretto.transports.engine import api, gate, http, proof, updates
from stretto.transports.engine.completions import decode_completions
from stretto.transports.engine.dispatch import FULL_S, Dispatch
from stretto.transports.engine.fleet import EngineState, Fleet
from stretto.transports.engine.handover import Handover
from stretto.transports.engine.routed import RoutedFleet

if TYPE_CHECKING:
    from jaxtyping import Int32

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_ROUTER_TIMEOUT_S = 120.0


class EngineClient:
    """All engines of a run; urls may end in /v1; admin_urls: the engines, if urls are a router's."""

    def __init__(
        self, urls: Iterable[str], admin_urls: Iterable[str] | None = None, api_key: str | None = None, *,
        timeout_s: float = 600.0, max_retries: int = 3, model: str | None = None,
        liveness_interval_s: float = 5.0, liveness_timeout_s: float = 30.0, recovery_timeout_s: float = 600.0,
        session_headers: tuple[str, ...] = (api.SESSION_HEADER,), splits_samples: bool = False,
        headers: Mapping[str, str] | None = None,
        on_down: Callable[[str, str], None] = lambda url, reason: None,
    ) -> None:  # fmt: skip
        self.urls = [_root(url) for url in urls]
        self.admin_urls = [_root(url) for url in (self.urls if admin_urls is None else admin_urls)]
        self.timeout_s, self.model = timeout_s, model
        self._session_headers = session_headers
        self._splits_samples = splits_samples  # each sample is an HTTP request of its own
        self._is_routed = self.urls != self.admin_urls
        fixed = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = http.Connections(fixed | dict(headers or {}), has_router=self._is_routed)
        self._manifest: WeightManifest | None = None  # of the newest version
        self._receivers: dict[str, updates.Receivers] = {}
        self._load_between_steps: set[str] = set()  # engines that load weights between two steps
        self._asleep: set[str] = set()  # those of api.SLEEP_TAGS whose memory engines have freed
        self._sleep_level: int | None = None  # of the last sleep; None: engines never slept
        self._failed_once: set[str] = set()  # live engines that failed to load the newest version once
        self._liveness_timeout_s = liveness_timeout_s
        self.fleet = Fleet(
            self.admin_urls,
            check=self._check_alive,
            restore=self._restore,
            prove=self._prove,
            interval_s=liveness_interval_s,
            recovery_timeout_s=recovery_timeout_s,
            on_down=on_down,
        )
        self._dispatch = Dispatch(
            self.urls, self._http, self.fleet, timeout_s=timeout_s, max_retries=max_retries,
            recovery_timeout_s=recovery_timeout_s, is_routed=self._is_routed,
        )  # fmt: skip
        self._routed = RoutedFleet(self.urls if self._is_routed else (), self.fleet, api_key)
        self._turn = itertools.count()
        self.num_replies = 0  # requests that were answered
        self.updated: dict[str, updates.Updated] = {}  # by engine: what it has told of the newest version
        self._handover = Handover(self.fleet, self._routed, self._admin, liveness_timeout_s)

    def generate(self, request: GenerateRequest) -> Coroutine[Any, Any, list[Completion]]:
        """The request's n samples; cancelling this call aborts the request on the engine.

        Raises: EngineError.
        """
        generate = self._generate_each if self._splits_samples and request.n > 1 else self._generate_samples
        return generate(request)

    async def _generate_each(self, request: GenerateRequest) -> list[Completion]:
        async with task_group() as group:
            tasks = [group.create_task(self._generate_samples(request.sample(i))) for i in range(request.n)]
        return [task.result()[0] for task in tasks]

    async def _generate_samples(self, request: GenerateRequest) -> list[Completion]:
        """The samples of one HTTP request; what an engine had begun when it was drained is continued on another."""
        body = api.encode_generate(request, request.adapter or self.model)
        session = request.session_id
        headers = api.JSON_HEADERS | ({} if session is None else dict.fromkeys(self._session_headers, session))
        mark = self._handover.mark()
        try:
            url, data = await self._dispatch.send(f"generate {request.request_id}", body, headers, request.session_id)
        except gate.Ended:
            return empty_completions(request.n)
        completions = decode_completions(request, data)
        self.num_replies += 1
        if not self._handover.covers(url, mark) or not any(each.finish_reason == ABORTED for each in completions):
            return completions
        samples = [request] if request.n == 1 else map(request.sample, range(request.n))
        async with task_group() as group:
            tasks = [group.create_task(self._continue(*each)) for each in zip(samples, completions, strict=True)]
        return [task.result() for task in tasks]

    async def _continue(self, request: GenerateRequest, begun: Completion) -> Completion:
        """The whole reply to a request for one sample, of which another engine had sampled the beginning."""
        if begun.finish_reason != ABORTED:
            return begun
        if not len(begun.token_ids) or request.prompt_logprobs or needs_whole_reply(request.sampling):
            return (await self._generate_samples(request))[0]
        rest = await self._generate_samples(continued_request(request, begun, request.sampling.seed))
        return merge_completions(begun, rest[0], request)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every engine is healthy.

        Raises: EngineError naming those that are not.
        """
        # Not the router, which is ready only when it has accepted an engine, after the first weights.
        waiting = dict.fromkeys(self.admin_urls, "no answer yet")

        async def poll(url: str) -> None:
            while True:
                try:
                    await self._http.request("GET", url + api.HEALTH)
                    del waiting[url]
                    return
                except http.Transient as error:
                    waiting[url] = str(error)
                    await asyncio.sleep(_POLL_S)

        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(poll(url) for url in list(waiting)))
        except TimeoutError:
            who = "; ".join(f"{url}: {why}" for url, why in waiting.items())
            raise EngineError(f"not ready after {timeout_s:g} s: {who}") from None

    async def update_weights(self, manifest: WeightManifest) -> None:
        """Load this version on every engine that is up; returns when they sample from it.

        Running requests keep their cache and continue under the new weights. An engine that does not load the version
        is down until it does.

        Raises: EngineError if all engines are down and none comes back in time.
        """
        to_retry: list[str] = []
        self.updated.clear()
        while True:
            await self.fleet.wait_for_any()  # without the lock, which an engine needs in order to come back
            async with self.fleet.updating:
                if len(self.admin_urls) > 1:
                    await self._group_nodes(self.fleet.ready())
                # An engine that has just come back has the previous version; one that comes back later loads this one.
                self._manifest = manifest
                failures = await self._load_all(self.fleet.whole_engines(to_retry) or self.fleet.ready())
            # If engines receive together, a dying one makes the others fail, which then try again.
            to_retry = []
            for url, error in failures.items():
                if (node := self.fleet.nodes.get(url)) is None or node.state is not EngineState.READY:
                    self._failed_once.discard(url)  # down, or it has left meanwhile
                elif url in self._failed_once or await self._is_dead(url):
                    await self.fleet.mark_down(url, error)
                    self._failed_once.discard(url)
                else:
                    self._failed_once.add(url)
                    to_retry.append(url)
            if not to_retry and self.fleet.ready():
                break
        if self._is_routed:
            await self._wait_for_router()

    async def _load_all(self, urls: list[str]) -> dict[str, str]:
        """Load the newest version on these engines together; returns the errors by engine."""
        groups, is_only = await self._groups(urls), len(self.admin_urls) == 1
        loads = [asyncio.ensure_future(self._load(url, group)) for url, group in zip(urls, groups)]
        is_together = self._manifest is not None and self._manifest.needs_group
        results = await _gather_loads(loads, self._liveness_timeout_s if is_together else None)
        failures: dict[str, str] = {}
        for url, result in zip(urls, results):
            # The only engine may be started anew after its end; what it refuses, it would refuse again.
            is_away = isinstance(getattr(result, "__cause__", None), http.Lost | http.Unavailable)
            if isinstance(result, EngineError) and (is_away or not is_only):
                failures[url] = str(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                self._failed_once.discard(url)
        return failures

    async def _is_dead(self, url: str) -> bool:
        try:
            await self._check_alive(url, is_idle=True)
        except EngineError:
            return True
        return False

    # -- engines that join and leave --

    async def add_engine(self, url: str) -> None:
        """Let an engine join: it gets the newest version, is compared with another engine, and then gets requests.

        A router gets it on its list then; one that has none must find it by itself, which the engine's `reason` says.
        Raises: EngineError if a router does not answer.
        """
        fault = await self._routed.fault()
        self._handover.forget(root := _root(url))
        for addresses in (self.admin_urls,) if self._is_routed else (self.urls, self.admin_urls):
            if root not in addresses:
                addresses.append(root)
        self.fleet.add(root, note="" if fault is None else f"{fault}: it must find this engine by itself")
        if fault is None:
            self._routed.follow([root])

    async def drain_engine(self, url: str, wait_s: float) -> None:
        """Send an engine nothing new; replies that do not end within wait_s are continued on other engines.

        Raises: EngineError if no other engine is up, or if a router would go on sending it requests.
        """
        await self._handover.drain(_root(url), wait_s)

    async def take_back_engine(self, url: str) -> None:
        """Have routers send requests again to an engine of the config that had left before a resume.

        Raises: EngineError if a router does not answer.
        """
        if self._is_routed and await self._routed.fault() is None:
            self._routed.follow([_root(url)])
            await self._handover.admit(_root(url), is_open=True)

    def forget_engine(self, url: str) -> None:
        """Remove an engine that was drained."""
        root = _root(url)
        for addresses in (self.urls, self.admin_urls):
            if root in addresses:
                addresses.remove(root)
        self.fleet.forget(root)
        self._receivers.pop(root, None)
        self.updated.pop(root, None)
        self._load_between_steps.discard(root)

    async def _prove(self, url: str) -> None:
        """Compare what a new engine computes with what one that is up does. Raises: EngineError if they differ."""
        if self._manifest is not None and (others := [other for other in self.fleet.ready() if other != url]):
            scores = [await proof.scores_of(self._admin, each, self.model) for each in (url, others[0])]
            proof.compare(*scores, other=others[0], version=self._manifest.version)
        if self._is_routed:
            await self._handover.admit(url, is_open=True)

    @property
    def paused_s(self) -> float:
        """For how long the slowest engine computed nothing in the latest update."""
        return max((each.paused_s for each in self.updated.values()), default=0.0)

    @property
    def num_ready(self) -> int:
        """Number of engines that are up."""
        return len(self.fleet.ready())

    @property
    def generation(self) -> int:
        """A number that grows whenever an engine goes down or comes back."""
        return self.fleet.generation

    async def watch(self) -> None:
        """Mark engines that die or hang as down, and readmit them when they are back; runs for ever."""
        async with task_group() as group:
            group.create_task(self.fleet.watch(), name="watch engines")
            group.create_task(self._routed.watch(), name="watch routers")
            if self._is_routed and not self._splits_samples:  # else prompts and replies have engines of their own
                group.create_task(self._dispatch.keep_busy(self.metrics_by_engine), name="watch queues")

    async def _check_alive(self, url: str, *, is_idle: bool = False) -> None:
        """Check that an engine is alive; is_idle: it loads no weights, so that its workers must answer too.

        Raises: EngineError if it is not alive.
        """
        node = self.fleet.nodes.get(url)
        is_idle = is_idle or (node is not None and node.state is EngineState.DOWN)
        query = f"?{api.IDLE}" if is_idle else ""
        try:
            async with asyncio.timeout(self._liveness_timeout_s):
                await self._http.request("GET", url + api.LIVENESS + query)
        except TimeoutError:
            raise EngineError(f"{url}{api.LIVENESS}: no answer in {self._liveness_timeout_s:g} s") from None
        except http.Transient as error:
            raise EngineError(str(error)) from error

    async def _restore(self, *urls: str) -> None:
        """Load the newest version on an engine that comes back, on all its nodes."""
        self._load_between_steps.difference_update(urls)
        if self._sleep_level is not None and "weights" in self._asleep:
            # The trainer uses the device: this engine wakes up with the others, and then loads the next version.
            await _gather_all(self._admin(url, api.sleep_route(self._sleep_level)) for url in urls)
            return
        if self._sleep_level is not None:  # one that did not answer may sleep
            await _gather_all(self._admin(url, f"{api.WAKE_UP}?tags=weights") for url in urls)
        if self._manifest is not None:
            groups = await self._groups(list(urls))
            await _gather_all(self._load(url, group) for url, group in zip(urls, groups))
            for url in urls:
                self.updated[url].check(url, self._manifest.version)
        if self._sleep_level is not None and not self._asleep:
            await _gather_all(self._admin(url, f"{api.WAKE_UP}?tags=kv_cache") for url in urls)

    async def _group_nodes(self, urls: Iterable[str]) -> None:
        """Record which addresses are nodes of one engine: these go down and come back together."""
        answers = await asyncio.gather(*map(self._fetch_receivers, urls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer  # after an EngineError the load will fail too, and mark the engine down
        names: dict[str, list[str]] = {}
        for url, receivers in self._receivers.items():
            if receivers.engine is not None:
                names.setdefault(receivers.engine, []).append(url)
        for together in names.values():
            self.fleet.group_nodes(together)

    async def _fetch_receivers(self, url: str) -> updates.Receivers:
        """Number of receiving processes at this address, and the engine's name; cached."""
        if url not in self._receivers:
            answer = await self._admin(url, api.WORLD_SIZE, method="GET")
            self._receivers[url] = updates.decode_receivers(answer)
        return self._receivers[url]

    async def _groups(self, urls: list[str]) -> list[WeightGroup | None]:
        """Each engine's WeightGroup for the newest version; None if the transport needs none."""
        assert self._manifest is not None
        if not self._manifest.needs_group:
            return [None] * len(urls)
        sizes = [(await self._fetch_receivers(url)).world_size for url in urls]
        request, total = uuid4().hex, sum(sizes)
        firsts = itertools.accumulate(sizes[:-1], initial=0)
        return [WeightGroup(request=request, world_size=total, rank=rank) for rank in firsts]

    async def _load(self, url: str, group: WeightGroup | None) -> None:
        """Load the newest version on one engine; if a call fails, the engine stays paused.

        An engine that loads between two steps gets UPDATE_WEIGHTS only. After a failure it gets all calls again,
        because a different engine may run at this address then.
        """
        manifest = self._manifest
        assert manifest is not None
        update = updates.encode_update(manifest, group)
        if url in self._load_between_steps:
            self._load_between_steps.discard(url)
            updated = updates.decode_updated(await self._admin(url, api.UPDATE_WEIGHTS, update))
            self._load_between_steps.add(url)
            self.updated[url] = updated
            return
        paused = time.perf_counter()
        await self._admin(url, f"{api.PAUSE}?mode=keep&clear_cache=false")
        started = await self._admin(url, api.START_UPDATE)
        updated = updates.decode_updated(await self._admin(url, api.UPDATE_WEIGHTS, update))
        await self._admin(url, api.FINISH_UPDATE, updates.encode_finish(manifest.version))
        if not self._asleep:  # else waiting requests have no cache; they continue when the engine is woken
            await self._admin(url, api.RESUME)
        self.updated[url] = msgspec.structs.replace(updated, paused_s=time.perf_counter() - paused)
        if updates.decode_started(started):
            self._load_between_steps.add(url)

    async def _wait_for_router(self) -> None:
        """Wait until the router has accepted an engine."""
        deadline = time.monotonic() + _ROUTER_TIMEOUT_S
        for url in self.urls:
            while True:
                try:
                    await self._check_router(url)
                    break
                except http.Transient as error:
                    if time.monotonic() > deadline:
                        raise EngineError(f"the router accepts no engine: {error}") from error
                await asyncio.sleep(_POLL_S)

    async def _check_router(self, url: str) -> None:
        """Check that a router has an engine: by READINESS, or by its models if it has no such route.

        Raises: http.Transient if it has none.
        """
        try:
            await self._http.request("GET", url + api.READINESS)
        except EngineError:
            if not api.has_models(await self._http.request("GET", url + api.MODELS)):
                raise http.Unavailable(f"{url}{api.MODELS}: no model") from None

    async def score_canary(
        self, token_ids: Int32[np.ndarray, " tokens"], name: str, image: CanaryImage | None = None
    ) -> dict[str, proof.CanaryScores]:
        """Score fixed tokens with every engine; by engine. One of several that dies meanwhile is left out.

        name: of the requests. image: for the placeholders in the tokens.

        Raises: EngineError if an engine returns no scores of a prompt.
        """
        ready, is_only = self.fleet.ready(), len(self.admin_urls) == 1
        calls = [
            proof.scores_of_canary(self._admin, url, self.model, token_ids, f"{name}-{i}", image)
            for i, url in enumerate(ready)
        ]
        by_engine: dict[str, proof.CanaryScores] = {}
        for url, result in zip(ready, await asyncio.gather(*calls, return_exceptions=True)):
            if not isinstance(result, BaseException):
                by_engine[url] = result
            elif not isinstance(result, EngineError) or is_only:
                raise result
            elif not self.fleet.is_ready(url):
                logger.info("engine %s left before it had scored the canary: %s", url, result)
            elif isinstance(result.__cause__, http.Lost) or await self._is_dead(url):  # it may be back already
                await self.fleet.mark_down(url, str(result))
            else:
                raise result
        return by_engine

    async def read(self, token_ids: Int32[np.ndarray, " tokens"], name: str) -> Completion:
        """What the next engine in turn computes for tokens that it reads; name: of the request.

        Raises: EngineError if it returns no scores of them, or if no engine is up.
        """
        if not (ready := self.fleet.ready()):
            raise EngineError("no engine is up")
        return await proof.read(self._admin, ready[next(self._turn) % len(ready)], self.model, token_ids, name)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End these requests with the tokens they have; None: all requests."""
        ids = None if request_ids is None else list(request_ids)
        self._handover.num_aborts += 1
        self._dispatch.end_held(None if ids is None else [f"generate {each}" for each in ids])
        await self._all("POST", api.ABORT, msgspec.json.encode({"request_ids": ids}))

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter on every engine that is up, for requests that name it.

        Raises: EngineError if one cannot load it.
        """
        body = msgspec.json.encode(api.LoadAdapterBody(lora_name=name, lora_path=directory, load_inplace=True))
        await self._all("POST", api.LOAD_ADAPTER, body)

    async def adapters(self) -> set[str]:
        """Names of the adapters that at least one ready engine has loaded."""
        answers = await self._all("GET", api.MODELS)
        return {name for answer in answers for name in api.adapter_names(answer)}

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on every engine that is up."""
        await self._all("POST", api.UNLOAD_ADAPTER, msgspec.json.encode({"lora_name": name}))

    async def metrics(self) -> dict[str, float]:
        """The engines' metrics by name, summed over engines and labels (histograms: _sum, _count).

        Those that have a label `position` are also there by position, as name/position.
        """
        total: dict[str, float] = {}
        for own in (await self.metrics_by_engine()).values():
            for name, value in own.items():
                total[name] = total.get(name, 0.0) + value
        if self._is_routed and gate.WAITING in total:
            total[gate.WAITING] += self._dispatch.num_held
        return total

    async def metrics_by_engine(self) -> dict[str, dict[str, float]]:
        """The same of each engine that is up, by its address.

        Raises: EngineError if one does not answer.
        """
        urls = self.fleet.ready()
        texts = await _gather_all(self._admin(url, api.METRICS, method="GET") for url in urls)
        return {url: api.metrics_of(text.decode()) for url, text in zip(urls, texts)}

    async def close(self) -> None:
        await self._http.close()

    async def sleep(self, level: int) -> None:
        """Have every engine free its memory: level 1 keeps the weights in host memory, level 2 drops them.

        Running requests end. A later one waits in its engine until both tags are woken.
        """
        async with self.fleet.updating:
            self._asleep, self._sleep_level = {*api.SLEEP_TAGS}, level
            self._handover.num_aborts += 1
            await self._admin_ready(api.sleep_route(level))

    async def wake_up(self, tag: str) -> None:
        """Have every engine allocate memory again: for `weights`, and, after these are loaded, for `kv_cache`."""
        async with self.fleet.updating:
            self._asleep.discard(tag)
            await self._admin_ready(f"{api.WAKE_UP}?tags={tag}")

    async def _admin_ready(self, path: str) -> None:
        """Make the same call to every engine that is up; if there are several, one that fails is marked down.

        Raises: EngineError if there is one engine and it fails.
        """
        urls, is_only = self.fleet.ready(), len(self.admin_urls) == 1
        results = await asyncio.gather(*(self._admin(url, path) for url in urls), return_exceptions=True)
        for url, result in zip(urls, results):
            if isinstance(result, EngineError) and not is_only:
                await self.fleet.mark_down(url, str(result))
            elif isinstance(result, BaseException):
                raise result

    async def _all(self, method: str, path: str, body: bytes | None = None) -> list[bytes]:
        """Make the same call to every engine; an error of one that is still up is raised, after all answers."""
        urls = self.fleet.ready()
        calls = (self._admin(url, path, body, method) for url in urls)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for url, answer in zip(urls, answers):
            if isinstance(answer, BaseException) and not (
                isinstance(answer, EngineError) and len(urls) > 1 and not self.fleet.is_ready(url)
            ):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _admin(self, url: str, path: str, body: bytes | None = None, method: str = "POST") -> bytes:
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    try:
                        return await self.fleet.while_up(
                            url, self._http.request(method, url + path, body, api.JSON_HEADERS)
                        )
                    except http.Full:
                        await asyncio.sleep(FULL_S)
        except TimeoutError:
            raise EngineError(f"{url}{path}: no answer in {self.timeout_s:g} s") from None
        except http.Transient as error:
            raise EngineError(str(error)) from error

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()


async def _gather_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results of all calls; the first failure is raised after all have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    if failures := [answer for answer in answers if isinstance(answer, BaseException)]:
        raise failures[0]
    return answers


async def _gather_loads(loads: list[asyncio.Task[None]], grace_s: float | None) -> list[BaseException | None]:
    """The outcome of each load; when one has failed, the others end within grace_s (None: no limit).

    Otherwise engines that receive together wait for the failed one until the transport's deadline, which is long.
    """
    try:
        _, running = await asyncio.wait(loads, return_when=asyncio.FIRST_EXCEPTION)
        if running:
            await asyncio.wait(running, timeout=grace_s)
    finally:
        for load in (late := [load for load in loads if not load.done()]):
            load.cancel()
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    too_late = EngineError(f"its update did not end within {grace_s} s after that of another engine failed")
    return [too_late if load in late else outcome for load, outcome in zip(loads, outcomes)]


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
