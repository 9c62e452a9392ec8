"""The routes of wires/service.py under `/v1/runs`: runs whose clients do not speak the Tinker API."""

from __future__ import annotations

import time

from aiohttp import web

from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.completions import encode_completions
from stretto_service.engines import request_of_sampler
from stretto_service.hub import USER, Routes, answer, read, read_generate
from stretto_service.runs.register import check_free, register
from stretto_service.store import Run, Sampler
from stretto_service.wires import service
from stretto_service.wires.service import CreateRun

KINDS = ("batch", "step", "publish", "save", "load")


class NativeRoutes(Routes):
    """The routes under `/v1/runs`, and `/v1/futures`."""

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
        """Make a run; the same request sent again, with its key, gets the same run."""
        run = register(self.hub, http[USER], await read(http, CreateRun))
        return answer({"id": run.id, "request_id": self.hub.training.created(run).id}, 201)

    async def runs(self, http: web.Request) -> web.Response:
        runs = self.hub.records_of(Run, http[USER])[::-1]
        return answer({"runs": [self._state(run) for run in runs]})

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
        future = await self.hub.training.receive(run, kind, int(number), await http.read())
        return answer({"request_id": future.id})

    async def future(self, http: web.Request) -> web.Response:
        user = http[USER]
        future = self.hub.futures.of(http.match_info["future"], user.name, is_admin=user.is_admin)
        result = await self.hub.futures.wait(future, service.POLL_S)
        return answer({"type": "try_again"} if result is None else result.json())

    async def generate(self, http: web.Request) -> web.Response:
        """Sample from the newest published version, or from the base model before there is one."""
        user, hub = http[USER], self.hub
        run = hub.run(user, http.match_info["run"])
        check_free(run)
        run.last_request_at = time.time()
        request = await read_generate(http, hub.max_model_len)
        hub.engines.check_room(user)
        sampler = Sampler(id=run.id, owner=run.owner, base_model=run.base_model, run=run.id)
        if run.published is not None:
            sampler.directory = hub.checkpoints.find(run.published, run.owner).directory
        request = request_of_sampler(request, sampler, f"{run.id}/{request.request_id}")
        completions = list(await hub.engines.generate(user, sampler, request))
        return answer(encode_completions(request, completions, [None] * len(completions)))
