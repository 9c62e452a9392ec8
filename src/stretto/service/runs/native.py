"""Routes of runs that are no clients of Tinker: `/v1/runs`, as transports/service.py describes them."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from stretto.service.engines import adapter_name
from stretto.service.hub import USER, Hub, answer, read
from stretto.service.runs.register import check_free, register
from stretto.service.store import Run, Sampler
from stretto.transports import service
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.completions import encode_completions
from stretto.transports.service import CreateRun

KINDS = ("batch", "step", "publish", "save", "load")


class NativeRoutes:
    """Handlers of one hub."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def routes(self) -> list[web.RouteDef]:
        run = service.RUNS + "/{run}"
        return [
            web.post(service.RUNS, self.create),
            web.get(service.RUNS, self.runs),
            web.get(run, self.run),
            web.post(run + "/{kind:" + "|".join(KINDS) + "}", self.submit),
            web.post(run + api.GENERATE, self.generate),
            web.get(service.FUTURES + "/{future:.+}", self.future),
        ]

    async def create(self, http: web.Request) -> web.Response:
        """A run with a name of its own; the same request again, with the key that it had, is answered with it."""
        body, user, hub = await read(http, CreateRun), http[USER], self.hub
        run = register(hub, user, body)
        return answer({"id": run.id, "request_id": hub.training.created(run).id}, 201)

    async def runs(self, http: web.Request) -> web.Response:
        found = [run for run in self.hub.store.all(Run) if http[USER].may_reach(run.owner)]
        return answer({"runs": [self._state(run) for run in found]})

    async def run(self, http: web.Request) -> web.Response:
        return answer(self._state(self.hub.run(http[USER], http.match_info["run"])))

    def _state(self, run: Run) -> dict:
        tenant = self.hub.training.places.tenants.get(run.id)
        return {
            "id": run.id,
            "owner": run.owner,
            "state": run.state,
            "reason": run.reason,
            "step": run.step,
            "next_seq": run.saved_seq + 1 if tenant is None else tenant.next_seq,
            "published": run.published,
        }

    async def submit(self, http: web.Request) -> web.Response:
        run = self.hub.run(http[USER], http.match_info["run"])
        number = http.query.get("seq", "")
        if not (number.isascii() and number.isdigit() and len(number) < 16) or int(number) < 1:
            raise Refusal("seq: the number of this request is missing, 1 for the first")
        kind = http.match_info["kind"]
        future = self.hub.training.submit(run, kind, int(number), await http.read())
        return answer({"request_id": future.id})

    async def future(self, http: web.Request) -> web.Response:
        user = http[USER]
        future = self.hub.futures.of(http.match_info["future"], user.name, is_admin=user.is_admin)
        result = await self.hub.futures.wait(future, service.POLL_S)
        return answer({"type": "try_again"} if result is None else result.json())

    async def generate(self, http: web.Request) -> web.Response:
        """Sample from the newest version of the run, or from the model before there is one."""
        user, hub = http[USER], self.hub
        run = hub.run(user, http.match_info["run"])
        check_free(run)
        run.last_request_at = time.time()
        request, _ = api.decode_generate(await http.read())
        hub.engines.check_room(user)
        sampler = Sampler(id=run.id, owner=run.owner, base_model=run.base_model, run=run.id)
        if run.published is not None:
            sampler.directory = hub.checkpoints.find(run.published, run.owner).directory
        salt = f"user {run.owner}" if sampler.directory is None else adapter_name(sampler)
        request = msgspec.structs.replace(
            request,
            request_id=f"{run.id}/{request.request_id}",
            adapter=None if sampler.directory is None else salt,
            cache_salt=f"{salt} {request.cache_salt or ''}",
        )
        completions = list(await hub.engines.generate(user, sampler, request))
        return answer(encode_completions(request, completions, [None] * len(completions)))
