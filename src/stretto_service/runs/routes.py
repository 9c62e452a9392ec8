"""Checks, states and ends of runs by name: `/runs/check` and `/runs/<run>`.

These routes take the name that a run has for its user, whom the token identifies.
"""

from __future__ import annotations

from aiohttp import web

from stretto_service.access import User
from stretto_service.hub import USER, Hub, Routes, answer, read
from stretto_service.runs.register import GONE, check_run
from stretto_service.store import Run
from stretto_service.wires.service import CHECK, END_NAMED, CheckRun


def find_run(hub: Hub, user: User, name: str) -> Run:
    """A user's run by its name, or any run that the user may access by its id. Raises: Refusal 404 or 403."""
    own = hub.store.get(Run, f"{user.name}:{name}")
    return own if own is not None else hub.run(user, name)


class RunRoutes(Routes):
    """The routes under `/runs` that are not of engines."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post(CHECK, self.check), web.get("/runs/{run}", self.run), web.post(END_NAMED, self.end)]

    async def check(self, http: web.Request) -> web.Response:
        """Check whether this run could begin now. Raises: Refusal with the first reason against it."""
        body, user = await read(http, CheckRun), http[USER]
        known = check_run(self.hub, user, body)
        state = "new" if known is None else known.state
        return answer({"user": user.name, "model": self.hub.model_name, "state": state})

    async def run(self, http: web.Request) -> web.Response:
        run = find_run(self.hub, http[USER], http.match_info["run"])
        return answer({"id": run.id, "state": run.state, "reason": run.reason, "step": run.step})

    async def end(self, http: web.Request) -> web.Response:
        """End the user's run of this name, unless it has ended or there is none."""
        user, name = http[USER], http.match_info["run"]
        run = self.hub.store.get(Run, f"{user.name}:{name}")
        is_there = run is not None and run.state not in GONE
        if is_there:
            assert run is not None
            self.hub.training.end(run)
            self.hub.audit.write(user.name, "end", run.id)
        return answer({"ended": is_there})
