"""The status of the service, and actions on runs: `/v1/status` and `/v1/runs/<id>/<action>`.

The admin sees, freezes, resumes, evicts and ends all runs, a user only the user's own.
"""

from __future__ import annotations

import os

from aiohttp import web

from stretto_service.hub import USER, Routes, answer, when
from stretto_service.store import Run


class AdminRoutes(Routes):
    """`/v1/status` and the actions on runs."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/status", self.status),
            web.post("/v1/runs/{run}/{action:freeze|resume|evict|end}", self.act),
        ]

    async def status(self, http: web.Request) -> web.Response:
        """The state of trainer and engines, and the runs that the user may access."""
        hub, user = self.hub, http[USER]
        runs = [
            {
                "id": run.id,
                "owner": run.owner,
                "state": run.state,
                "reason": run.reason,
                "step": run.step,
                "rank": run.spec.rank,
                "waiting": hub.training.queue.waiting(run.id) if run.id in hub.training.places.tenants else 0,
                "last_request_at": when(run.last_request_at or None),
            }
            for run in self.hub.records_of(Run, user)
        ]
        trainer = {
            "is_ready": hub.training.is_ready,
            "turns": hub.training.num_turns,
            "tokens": hub.training.num_tokens,
            "recoveries": hub.training.num_recoveries,
            "places": hub.cfg.service.num_places,
            "places_taken": len(hub.training.places.tenants),
        }
        engines = {
            "ready": hub.engines.client.num_ready,
            "sampled_tokens": hub.engines.num_tokens,
            "adapter_loads": hub.engines.slots.num_loads,
            "adapter_hits": hub.engines.slots.num_hits,
        }
        return answer(
            {
                "model": hub.model_name,
                "started_at": when(hub.started_at),
                "pid": os.getpid(),
                "runs": runs,
                "trainer": trainer,
                "engines": engines,
            }
        )

    async def act(self, http: web.Request) -> web.Response:
        """Freeze, resume, evict or end a run."""
        user, action = http[USER], http.match_info["action"]
        run = self.hub.run(user, http.match_info["run"])
        match action:
            case "freeze":
                self.hub.training.freeze(run, f"{user.name} has frozen it", by_admin=user.is_admin)
            case "resume":
                self.hub.training.resume(run, by_admin=user.is_admin)
            case "evict":
                self.hub.training.evict(run, f"{user.name} has evicted it")
            case "end":
                self.hub.training.end(run)
        return answer({"id": run.id, "state": run.state})
