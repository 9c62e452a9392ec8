"""Whether a service takes a run, and what it knows of one: `/runs/check` and `/runs/<run>`.

A run is called by its own name here; the user comes with the token.
"""

from __future__ import annotations

from aiohttp import web

from stretto.service.access import User
from stretto.service.hub import USER, Hub, answer, read
from stretto.service.runs.client import CheckRun
from stretto.service.runs.register import GONE, check_run
from stretto.service.store import Run


def find_run(hub: Hub, user: User, name: str) -> Run:
    """A user's run by its own name, or any that he may reach by its id. Raises: Refusal 404 or 403."""
    own = hub.store.get(Run, f"{user.name}:{name}")
    return own if own is not None else hub.run(user, name)


class RunRoutes:
    """Handlers of one hub."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/runs/check", self.check),
            web.get("/runs/{run}", self.run),
            web.post("/runs/{run}/end", self.end),
        ]

    async def check(self, http: web.Request) -> web.Response:
        """Whether this run could begin now. Raises: Refusal with the first reason why it could not."""
        body, user = await read(http, CheckRun), http[USER]
        known = check_run(self.hub, user, body)
        state = "new" if known is None else known.state
        return answer({"user": user.name, "model": self.hub.model_name, "state": state})

    async def run(self, http: web.Request) -> web.Response:
        run = find_run(self.hub, http[USER], http.match_info["run"])
        return answer({"id": run.id, "state": run.state, "reason": run.reason, "step": run.step})

    async def end(self, http: web.Request) -> web.Response:
        """End the run of this name, if the user has one that takes a place or could again."""
        user, name = http[USER], http.match_info["run"]
        run = self.hub.store.get(Run, f"{user.name}:{name}")
        is_there = run is not None and run.state not in GONE
        if is_there:
            assert run is not None
            self.hub.training.end(run)
            self.hub.audit.write(user.name, "end", run.id)
        return answer({"ended": is_there})
