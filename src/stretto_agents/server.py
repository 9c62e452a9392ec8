"""An HTTP server on 127.0.0.1 that answers the programs of rollouts with turns of the policy.

Every rollout has a key; a request with it is a request of that rollout, whatever model it names. How the policy
samples is the run's: of a request's settings only its limit of tokens has an effect, and the log names the others once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from stretto.base.errors import DataError, StrettoError
from stretto.data.messages import short_repr
from stretto.envs.base import LimitReached, OutOfContext, RolloutContext
from stretto_agents.dialects import DIALECTS, Dialect, framed
from stretto_agents.session import Session

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 2**20
_HEARD = {
    "model", "messages", "input", "instructions", "system", "stream", "stream_options", "tools", "n", "user",
    "previous_response_id", "max_tokens", "max_completion_tokens", "max_output_tokens", "metadata", "store", "include",
    "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "client_metadata",
}  # fmt: skip
"""What a request is read for, and what changes no reply at a provider either."""
_NOTHING: tuple[Any, ...] = (None, "auto", [], {}, {"type": "auto"})
_MOST_NAMED = 32
"""Settings without effect that are named: whoever sends names without end fills no log."""
TOO_LONG = "prompt is too long, this model's maximum context length is exceeded"
"""What clients of Anthropic and of OpenAI look for before they compact their history."""
_SHUTDOWN_S = 1.0


@dataclass(frozen=True)
class Access:
    """What a program needs to reach the policy."""

    session: Session
    base_url: str
    """With `/v1`, as clients of OpenAI want it."""
    key: str

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that clients of OpenAI and Anthropic read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.key,
        }


class Gateway:
    """The server; it is started by the first rollout. host: the address of this machine that programs use."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._starting = asyncio.Lock()
        self._named: set[str] = set()

    @contextlib.asynccontextmanager
    async def open(self, ctx: RolloutContext) -> AsyncIterator[Access]:
        """A session for a rollout, with a key that is valid until it ends."""
        async with self._starting:
            await self._start()
        key = f"sk-{secrets.token_hex(24)}"
        session = self._sessions[key] = Session(ctx)
        try:
            yield Access(session, f"http://{self._host}:{self._port}/v1", key)
        finally:
            del self._sessions[key]
            await session.close()

    async def close(self) -> None:
        """Stop the server."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _start(self) -> None:
        if self._runner is not None:
            return
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for route, dialect in DIALECTS.items():
            for prefix in ("/v1", ""):  # ANTHROPIC_BASE_URL has no /v1, and some programs add none
                app.router.add_post(prefix + route, self._handler(dialect))
        app.router.add_get("/v1/models", self._models)
        self._runner = runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        site = web.TCPSite(runner, self._host, 0)
        await site.start()
        self._port = runner.addresses[0][1]

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})

    def _handler(self, dialect: Dialect) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            session = self._sessions.get(_key_of(http))
            if session is None:
                return _refused(dialect, 401, "authentication_error", "no rollout has this key, or it is over")
            try:
                return await self._answer(dialect, session, http)
            except OutOfContext as error:
                text = f"{TOO_LONG}: {error}"
                return _refused(dialect, 400, "invalid_request_error", text, "context_length_exceeded")
            except LimitReached as error:  # clients repeat a request after most other statuses
                return _refused(dialect, 403, "permission_error", str(error))
            except DataError as error:
                return _refused(dialect, 400, "invalid_request_error", str(error))
            except StrettoError as error:
                return _refused(dialect, 400, "api_error", str(error))

        return handle

    async def _answer(self, dialect: Dialect, session: Session, http: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await http.read())
        except ValueError as cause:
            raise DataError(f"the body is no JSON: {cause}") from None
        request = dialect.request(body)
        self._name_settings(body)
        model = str(body.get("model") or "policy")
        answer = await session.answer(request)
        if not request.is_streamed:
            return web.json_response(dialect.write(answer, model))
        stream = b"".join(map(framed, dialect.stream(answer, model, request)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with contextlib.suppress(ConnectionError):  # a program that goes away has its turn all the same
            await response.prepare(http)
            await response.write(stream)
            await response.write_eof()
        return response

    def _name_settings(self, body: dict[str, Any]) -> None:
        for name in body.keys() - _HEARD - self._named:
            if body[name] not in _NOTHING and len(self._named) < _MOST_NAMED:
                self._named.add(name)
                text = "a program requests %s = %s: it has no effect, the run's sampling decides"
                logger.warning(text, name[:60], short_repr(body[name]))


def _key_of(http: web.Request) -> str:
    bearer = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return http.headers.get("x-api-key") or bearer


def _refused(dialect: Dialect, status: int, kind: str, text: str, code: str | None = None) -> web.Response:
    return web.json_response(dialect.refuse(kind, text, code), status=status)
