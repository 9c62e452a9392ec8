"""Whether a service takes a run, and what it knows of one: `/runs/check` and `/runs/<run>`.

A run is called by its own name here; the user comes with the token.
"""

from __future__ import annotations

from aiohttp import web

from stretto.records.tenants import TenantSpec
from stretto.service.access import User
from stretto.service.checkpoints import check_name
from stretto.service.hub import USER, Hub, answer, read
from stretto.service.runs.client import CheckRun, tokenizer_digest
from stretto.service.store import Run
from stretto.transports.engine.api import Refusal

GONE = ("ended", "failed")


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
        known = self._check(body, user)
        state = "new" if known is None else known.state
        return answer({"user": user.name, "model": self.hub.model_name, "state": state})

    def _check(self, body: CheckRun, user: User) -> Run | None:
        hub, spec = self.hub, body.spec
        hub.check_model(body.base_model)
        check_name(spec.name)
        check_rank(hub, spec)
        if body.seq_len > hub.cfg.seq_len:
            raise Refusal(f"seq_len = {body.seq_len} must be at most {hub.cfg.seq_len}, that of this service")
        own = tokenizer_digest(hub.cfg.tokenizer.name or hub.model_name)
        if None not in (own, body.tokenizer) and own != body.tokenizer:
            raise Refusal("tokenizer: this run's tokenizer.json is not that of the service's model")
        known = hub.store.get(Run, f"{user.name}:{spec.name}")
        is_there = known is not None and known.state not in GONE
        if is_there and not body.may_exist:
            assert known is not None
            raise Refusal(
                f"you have a run {spec.name!r} already ({known.state}, step {known.step}); continue it with --resume, "
                "end it with --clean, or choose another run.name",
                409,
            )
        if known is None or not known.is_placed:
            hub.training.check_place(user.name)
        return known

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


def check_rank(hub: Hub, spec: TenantSpec) -> None:
    """Raises: Refusal for a rank that this service's adapters cannot have."""
    largest = hub.cfg.service.max_lora_rank
    if not 0 < spec.rank <= largest:
        raise Refusal(f"rank = {spec.rank} must be 1 to {largest} (service.max_lora_rank)")
