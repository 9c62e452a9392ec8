"""The engine API for one run: `/runs/<run>/engine/...`, where its orchestrator finds what it asks of engines.

Samples come from the service's engines, with the version of the run's adapter that its orchestrator has loaded: loading
a version here checks that the trainer has published it, and makes it the one that new requests get. A request keeps its
version to its end, and its tokens are marked with it. Pausing, aborting and metrics are of the run's own requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
from aiohttp import web

from stretto.records.generate import Completion, GenerateRequest, VersionSpan
from stretto.service.engines import adapter_name
from stretto.service.hub import USER, Hub, answer, read
from stretto.service.runs.register import GONE, check_free
from stretto.service.runs.routes import find_run
from stretto.service.store import Checkpoint, Run, Sampler
from stretto.transports.engine import api, updates
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.completions import encode_completions

PREFIX = "/runs/{run}/engine"


@dataclass
class _State:
    """What the engine of one run is doing."""

    version: int | None = None
    """The version that new requests get; None: the orchestrator has loaded none yet."""
    path: str = ""
    """That of the checkpoint that has it; the same version published again is another directory."""
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while paused."""
    requests: dict[str, asyncio.Event] = field(default_factory=dict)
    """By id: set once the request is to end."""
    running: set[str] = field(default_factory=set)
    """Ids of those that an engine has."""
    num_tokens: int = 0


class EngineRoutes:
    """Handlers of one hub."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._states: dict[str, _State] = {}
        """By the name that only this run has: another with its id begins anew."""

    def routes(self) -> list[web.RouteDef]:
        gets = {
            api.HEALTH: self.health,
            api.LIVENESS: self.health,
            api.READINESS: self.health,
            api.MODELS: self.models,
            api.METRICS: self.metrics,
            api.IS_PAUSED: self.is_paused,
            api.WORLD_SIZE: self.world_size,
        }
        posts = {
            api.GENERATE: self.generate,
            api.PAUSE: self.pause,
            api.RESUME: self.resume,
            api.ABORT: self.abort,
            api.START_UPDATE: self.start_update,
            api.UPDATE_WEIGHTS: self.update,
            api.FINISH_UPDATE: self.finish_update,
        }
        found = [web.get(PREFIX + path, handler) for path, handler in gets.items()]
        return found + [web.post(PREFIX + path, handler) for path, handler in posts.items()]

    def _find(self, http: web.Request) -> tuple[Run, _State]:
        run = find_run(self.hub, http[USER], http.match_info["run"])
        if (state := self._states.get(run.spec.name)) is None:
            known = {each.spec.name for each in self.hub.store.all(Run) if each.state not in GONE}
            self._states = {name: each for name, each in self._states.items() if name in known}
            state = self._states[run.spec.name] = _awake()
        return run, state

    # -- samples --

    async def generate(self, http: web.Request) -> web.Response:
        """Samples of the loaded version, as soon as this user has a slot."""
        user, (run, state) = http[USER], self._find(http)
        check_free(run)
        run.last_request_at = time.time()
        request, _ = api.decode_generate(await http.read())
        await state.awake.wait()
        self.hub.engines.check_room(user)
        sampler = self._sampler(run, state)
        version = 0 if state.version is None else state.version
        own = f"{run.id}/{request.request_id}"
        if own in state.requests:
            raise Refusal(f"request_id: {request.request_id!r} is running already", 409)
        stop = state.requests[own] = asyncio.Event()
        try:
            completions = await self._until(stop, user, sampler, _as_engines(request, own, sampler), state)
        finally:
            state.requests.pop(own, None)
            state.running.discard(own)
        found = [_stamped(completion, version) for completion in completions]
        state.num_tokens += sum(len(completion.token_ids) for completion in found)
        return answer(encode_completions(request, found, [None] * len(found)))

    def _sampler(self, run: Run, state: _State) -> Sampler:
        """The adapter that a new request gets; after a restart of the service the newest published one."""
        if state.version is None and run.published is not None:
            found = self.hub.store.get(Checkpoint, run.published)
            if found is not None:
                state.version, state.path = _number(found), found.path
        if state.version is None:
            raise Refusal(f"{run.id} has published no version yet", 503)
        directory = self.hub.checkpoints.find(state.path, run.owner).directory
        return Sampler(id=run.id, owner=run.owner, base_model=run.base_model, run=run.id, directory=directory)

    async def _until(
        self, stop: asyncio.Event, user: object, sampler: Sampler, request: GenerateRequest, state: _State
    ) -> list[Completion]:
        """The samples; of a request that is aborted what an engine has, or nothing if none has begun."""

        def began() -> None:
            state.running.add(request.request_id)

        task = asyncio.ensure_future(
            self.hub.engines.generate(user, sampler, request, on_start=began)  # type: ignore[arg-type]
        )
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() or request.request_id in state.running:
                return list(await task)
            empty = Completion(
                token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="abort"
            )
            return [empty] * request.n
        finally:
            stopped.cancel()
            task.cancel()

    async def abort(self, http: web.Request) -> web.Response:
        """End requests of this run: those that are named, or all."""
        body: api.AbortBody = await read(http, api.AbortBody)
        run, state = self._find(http)
        names = None if body.request_ids is None else {f"{run.id}/{name}" for name in body.request_ids}
        chosen = [name for name in state.requests if names is None or name in names]
        for name in chosen:
            state.requests[name].set()
        if running := [name for name in chosen if name in state.running]:
            await self.hub.engines.client.abort(running)
        return answer({"aborted": len(chosen)})

    # -- versions --

    async def start_update(self, http: web.Request) -> web.Response:
        self._find(http)
        return web.Response(
            body=updates.encode_started(loads_between_steps=True), content_type="application/json"
        )

    async def update(self, http: web.Request) -> web.Response:
        """Give new requests this version. Raises: Refusal 400 if the run has not published it."""
        run, state = self._find(http)
        version = updates.decode_update(await http.read()).manifest.version
        own = [
            each for each in self.hub.store.all(Checkpoint) if each.run == run.id and each.kind == "sampler"
        ]
        found = next((each for each in own if _number(each) == version), None)
        if found is None:
            raise Refusal(f"version {version} of {run.id} is not published here")
        state.version, state.path = version, found.path
        return answer({"message": "Weights updated", "version": version})

    async def finish_update(self, http: web.Request) -> web.Response:
        self._find(http)
        updates.decode_finish(await http.read())
        return answer({"message": "Weight update finished"})

    # -- what it is doing --

    async def pause(self, http: web.Request) -> web.Response:
        """Hold new requests until `resume`; with mode=abort also end those that run."""
        _, state = self._find(http)
        mode = http.query.get("mode", "abort")
        if mode not in api.PAUSE_MODES:
            raise Refusal(f"mode = {mode!r} must be one of {', '.join(api.PAUSE_MODES)}")
        state.awake.clear()
        if mode == "abort" and state.running:
            for name in state.running:
                state.requests[name].set()
            await self.hub.engines.client.abort(list(state.running))
        return answer({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        _, state = self._find(http)
        state.awake.set()
        return answer({"status": "resumed"})

    async def is_paused(self, http: web.Request) -> web.Response:
        _, state = self._find(http)
        return answer({"is_paused": not state.awake.is_set()})

    async def health(self, http: web.Request) -> web.Response:
        """200 while an engine is up; whether the run is there too says MODELS."""
        if not self.hub.engines.client.num_ready:
            raise Refusal("no engine of this service is up", 503)
        return answer({"status": "ok"})

    async def models(self, http: web.Request) -> web.Response:
        run, state = self._find(http)
        model = {"id": run.base_model, "object": "model", "max_model_len": self.hub.max_model_len}
        return answer({"object": "list", "data": [model | {"version": state.version}]})

    async def world_size(self, http: web.Request) -> web.Response:
        self._find(http)
        return web.Response(body=updates.encode_world_size(1), content_type="application/json")

    async def metrics(self, http: web.Request) -> web.Response:
        """The run's own requests, in the format of Prometheus."""
        _, state = self._find(http)
        values = {
            "vllm:num_requests_running": len(state.running),
            "vllm:num_requests_waiting": len(state.requests) - len(state.running),
            "vllm:generation_tokens_total": state.num_tokens,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in values.items()))


def _awake() -> _State:
    state = _State()
    state.awake.set()
    return state


def _number(version: Checkpoint) -> int | None:
    """The number of a published version; None for weights that were saved for sampling otherwise."""
    number = version.name.removeprefix("v")
    return int(number) if number.isdigit() else None


def _as_engines(request: GenerateRequest, name: str, sampler: Sampler) -> GenerateRequest:
    """The request as the service's engines get it: with the run's adapter, and a salt that nobody else has."""
    adapter = adapter_name(sampler)
    salt = f"{adapter} {request.cache_salt or ''}"
    return msgspec.structs.replace(request, request_id=name, adapter=adapter, cache_salt=salt)


def _stamped(completion: Completion, version: int) -> Completion:
    """The completion, all of whose tokens were sampled from this version."""
    span = (VersionSpan(version, 0, len(completion.token_ids)),) if len(completion.token_ids) else ()
    return msgspec.structs.replace(completion, versions=span)
