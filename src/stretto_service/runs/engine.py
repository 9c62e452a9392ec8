"""The engine API for one run, `/runs/<run>/engine/...`: to its orchestrator the service is an engine.

Samples come from the service's engines, with the version of the run's adapter that its orchestrator has loaded. Loading
a version here checks that the trainer has published it, and gives it to new requests. A request keeps its version to
its end, and its tokens are marked with it. Pausing, aborting and metrics concern the run's own requests only.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from stretto.records.generate import Completion, GenerateRequest, VersionSpan
from stretto.records.partial import empty_completions
from stretto.transports.engine import api, updates
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.completions import encode_completions
from stretto_service.access import User
from stretto_service.engines import request_of_sampler
from stretto_service.hub import USER, Hub, Routes, answer, read, read_generate
from stretto_service.runs.register import GONE, check_free
from stretto_service.runs.routes import find_run
from stretto_service.store import Checkpoint, Run, Sampler
from stretto_service.training.checkpoints import published_version

PREFIX = "/runs/{run}/engine"


@dataclass
class _State:
    """The state of one run's engine."""

    version: int | None = None
    """The version that new requests get; None: the orchestrator has loaded none yet."""
    path: str = ""
    """Path of this version's checkpoint, whose directory is another one if the version was published again."""
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while paused."""
    requests: dict[str, asyncio.Event] = field(default_factory=dict)
    """By id: set when the request is aborted."""
    running: set[str] = field(default_factory=set)
    """Ids of requests that an engine has."""
    num_tokens: int = 0


class EngineRoutes(Routes):
    """The engines of all runs."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._states: dict[str, _State] = {}
        """By spec.name, which is unique, whereas a later run may get the same id."""

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
        return [
            *(web.get(PREFIX + path, handler) for path, handler in gets.items()),
            *(web.post(PREFIX + path, handler) for path, handler in posts.items()),
        ]

    def _find(self, http: web.Request) -> tuple[Run, _State]:
        run = find_run(self.hub, http[USER], http.match_info["run"])
        if (state := self._states.get(run.spec.name)) is None:
            names = {each.spec.name for each in self.hub.store.all(Run) if each.state not in GONE}
            self._states = {name: each for name, each in self._states.items() if name in names}
            state = self._states[run.spec.name] = _State()
            state.resumed.set()
        return run, state

    # -- samples --

    async def generate(self, http: web.Request) -> web.Response:
        """Samples of the loaded version, when the user gets a slot."""
        user, (run, state) = http[USER], self._find(http)
        check_free(run)
        run.last_request_at = time.time()
        request = await read_generate(http, self.hub.max_model_len)
        await state.resumed.wait()
        self.hub.engines.check_room(user)
        sampler = self._sampler(run, state)
        version = 0 if state.version is None else state.version
        name = f"{run.id}/{request.request_id}"
        if name in state.requests:
            raise Refusal(f"request_id: {request.request_id!r} is running already", 409)
        state.requests[name] = asyncio.Event()
        try:
            samples = await self._sample(user, sampler, request_of_sampler(request, sampler, name), state)
        finally:
            state.requests.pop(name, None)
            state.running.discard(name)
        completions = [_with_version(sample, version) for sample in samples]
        state.num_tokens += sum(len(completion.token_ids) for completion in completions)
        return answer(encode_completions(request, completions, [None] * len(completions)))

    def _sampler(self, run: Run, state: _State) -> Sampler:
        """The adapter that a new request gets: the loaded one, or, after a restart of the hub, the newest published."""
        if state.version is None and run.published is not None:
            newest = self.hub.store.get(Checkpoint, run.published)
            if newest is not None:
                state.version, state.path = published_version(newest), newest.path
        if state.version is None:
            raise Refusal(f"{run.id} has published no version yet", 503)
        directory = self.hub.checkpoints.find(state.path, run.owner).directory
        return Sampler(id=run.id, owner=run.owner, base_model=run.base_model, run=run.id, directory=directory)

    async def _sample(self, user: User, sampler: Sampler, request: GenerateRequest, state: _State) -> list[Completion]:
        """The samples; for an aborted request what an engine has of them, empty ones if none has begun."""
        name = request.request_id
        sampling = self.hub.engines.generate(user, sampler, request, on_start=lambda: state.running.add(name))
        task = asyncio.ensure_future(sampling)
        aborted = asyncio.ensure_future(state.requests[name].wait())
        try:
            await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() or name in state.running:
                return list(await task)
            return empty_completions(request.n)
        finally:
            aborted.cancel()
            task.cancel()

    async def abort(self, http: web.Request) -> web.Response:
        """End the named requests of this run, or all."""
        body: api.AbortBody = await read(http, api.AbortBody)
        run, state = self._find(http)
        names = None if body.request_ids is None else {f"{run.id}/{name}" for name in body.request_ids}
        aborted = [name for name in state.requests if names is None or name in names]
        await self._abort(state, aborted)
        return answer({"aborted": len(aborted)})

    async def _abort(self, state: _State, names: list[str]) -> None:
        for name in names:
            state.requests[name].set()
        if running := [name for name in names if name in state.running]:
            await self.hub.engines.client.abort(running)

    # -- versions --

    async def start_update(self, http: web.Request) -> web.Response:
        self._find(http)
        return web.Response(body=updates.encode_started(loads_between_steps=True), content_type="application/json")

    async def update(self, http: web.Request) -> web.Response:
        """Load a version for new requests. Raises: Refusal 400 if the run has not published it."""
        run, state = self._find(http)
        version = updates.decode_update(await http.read()).manifest.version
        own = (each for each in self.hub.store.all(Checkpoint) if each.run == run.id)
        found = next((each for each in own if published_version(each) == version), None)
        if found is None:
            raise Refusal(f"version {version} of {run.id} is not published here")
        state.version, state.path = version, found.path
        return answer({"message": "Weights updated", "version": version})

    async def finish_update(self, http: web.Request) -> web.Response:
        self._find(http)
        updates.decode_finish(await http.read())
        return answer({"message": "Weight update finished"})

    # -- pauses and state --

    async def pause(self, http: web.Request) -> web.Response:
        """Make new requests wait until `resume`; with mode=abort also end running ones."""
        _, state = self._find(http)
        mode = api.pause_mode(http.query)
        state.resumed.clear()
        if mode == "abort":
            await self._abort(state, list(state.running))
        return answer({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        _, state = self._find(http)
        state.resumed.set()
        return answer({"status": "resumed"})

    async def is_paused(self, http: web.Request) -> web.Response:
        _, state = self._find(http)
        return answer({"is_paused": not state.resumed.is_set()})

    async def health(self, http: web.Request) -> web.Response:
        """200 while an engine is up; MODELS also checks that the run exists."""
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
        """Metrics of the run's own requests, in the format of Prometheus."""
        _, state = self._find(http)
        values = {
            "vllm:num_requests_running": len(state.running),
            "vllm:num_requests_waiting": len(state.requests) - len(state.running),
            "vllm:generation_tokens_total": state.num_tokens,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in values.items()))


def _with_version(completion: Completion, version: int) -> Completion:
    """The completion with all of its tokens marked with this version."""
    span = (VersionSpan(version, 0, len(completion.token_ids)),) if len(completion.token_ids) else ()
    return msgspec.structs.replace(completion, versions=span)
