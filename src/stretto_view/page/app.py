"""The HTTP routes of the page: files of the page itself, JSON about runs, and a stream of what has changed.

Requests only read, but for those of a chat, which only a page with a token has. Answers are computed in threads, so
that a slow one does not delay the others. Text of rollouts is untrusted: it is sent as JSON and inserted into the page
as text, never as markup, and the content security policy allows only the page's own files to run.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from importlib import resources
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from stretto import state
from stretto.base.errors import ConfigError, DataError, EngineError, StrettoError, reason_of
from stretto.base.ports import refusal_of
from stretto_view.page import chat, conversation, export, routes
from stretto_view.page.library import Library, OpenRun
from stretto_view.page.query import check_names

logger = logging.getLogger(__name__)

LIBRARY = web.AppKey("library", Library)
TOKEN = web.AppKey("token", str)
"""The token that a request must have; "": none is needed, and only this machine is served."""
CHAT = web.AppKey("chat", chat.Chat)
COOKIE = "stretto-view"
POLL_S = 1.0
_PING_S = 15.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Cached:
    """The result of a function, computed in a thread at most about once per second, for all open tabs."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute, self._lock = compute, asyncio.Lock()
        self._result: Any = None
        self._computed_at = float("-inf")

    async def get(self) -> Any:
        async with self._lock:
            if time.monotonic() - self._computed_at > POLL_S * 0.9:
                self._result = await asyncio.to_thread(self._compute)
                self._computed_at = time.monotonic()
            return self._result


STAMPS = web.AppKey("stamps", _Cached)


def build(library: Library, token: str = "", *, has_chat: bool = False) -> web.Application:
    """The application; with a token, requests without it are refused. has_chat: needs a token."""
    assert token or not has_chat, "a chat without a token would give a run's engines to every user of the machine"
    app = web.Application(middlewares=[_guard])
    app[LIBRARY], app[TOKEN] = library, token
    app[STAMPS] = _Cached(lambda: {name: run.stamp() for name, run in library.runs().items()})
    app.router.add_get("/", _page)
    app.router.add_get("/static/{name}", _static)
    app.router.add_get("/api/runs", _runs)
    app.router.add_get("/api/changes", _changes)
    app.router.add_get("/api/run/{run}/image/{hash:[0-9a-f]{32}}", _image)
    app.router.add_get("/api/view", _view)
    if has_chat:
        app[CHAT] = chat.Chat()
        app.cleanup_ctx.append(_chatting)
    app.router.add_get("/api/run/{run}/chat", _chat_places)
    app.router.add_post("/api/run/{run}/chat/start", _chat_start)
    app.router.add_post("/api/run/{run}/chat", _chat_reply)
    for name, route in routes.PER_RUN.items():
        app.router.add_get(f"/api/run/{{run}}/{name}", _answering(route))
    for name, file in export.FILES.items():
        app.router.add_get(f"/api/run/{{run}}/{name}", _sending(name, file))
    return app


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[TOKEN]
    if token:
        if "token" in request.query and hmac.compare_digest(request.query["token"].encode(), token.encode()):
            found = web.HTTPFound("/")  # without the token, so that the browser's history does not keep it
            found.set_cookie(cookie(token), token, httponly=True, samesite="Strict")
            raise found
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")  # of a script
        given = key.strip() if scheme.lower() == "bearer" else request.cookies.get(cookie(token), "")
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise web.HTTPUnauthorized(
                text="open the address that `stretto view` printed: it ends with ?token=... "
                "A script sends that token: -H 'Authorization: Bearer TOKEN'\n"
            )
    if refused := refusal_of(request.method, request.headers, has_key=bool(token)):
        return web.Response(status=refused[0], text=refused[1] + "\n")
    answer: web.StreamResponse
    try:
        answer = await handler(request)
    except web.HTTPException as error:  # raised by aiohttp
        if error.status not in (404, 405) or not request.path.startswith("/api/"):
            raise
        what = f"there is no {request.path}" if error.status == 404 else f"{request.path} takes no {request.method}"
        answer = _json({"error": f"{what}; /api/view lists the addresses."}, status=error.status)
    except ConnectionError:  # the browser has disconnected
        raise
    except ConfigError as error:
        answer = _json({"error": str(error)}, status=400)
    except StrettoError as error:
        answer = _json({"error": str(error)}, status=404)
    except OSError as error:
        answer = _json({"error": f"cannot be read: {reason_of(error)}"}, status=404)
    except Exception as error:  # a damaged file, for example: the page shows the message and stays usable
        logger.exception("%s failed", request.path)
        message = f"{type(error).__name__}: {error}; is a file of this run damaged? The page's log has more."
        answer = _json({"error": message}, status=500)
    if not answer.prepared:
        answer.headers.update(_HEADERS)
    return answer


def cookie(token: str) -> str:
    """The name of a token's cookie. Pages on several ports of a host share its cookies, so each has its own name."""
    return f"{COOKIE}-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


# -- the page's own files --


async def _page(request: web.Request) -> web.Response:
    return _file("index.html")


async def _static(request: web.Request) -> web.Response:
    return _file(request.match_info["name"])


def _file(name: str) -> web.Response:
    folder = resources.files("stretto_view.page") / "static"
    if name not in {entry.name for entry in folder.iterdir()}:
        raise web.HTTPNotFound()
    kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    return web.Response(body=(folder / name).read_bytes(), content_type=kind, charset="utf-8")


# -- about runs --


async def _runs(request: web.Request) -> web.Response:
    found = await asyncio.to_thread(request.app[LIBRARY].runs)
    rows = await asyncio.to_thread(lambda: [{"id": name, **_described(run)} for name, run in found.items()])
    return _json(rows)


def _described(run: OpenRun) -> dict[str, Any]:
    """The row of a run; one fault that nobody foresaw leaves the other runs in the list."""
    try:
        return state.describe(run.dir)
    except Exception as error:
        logger.exception("%s cannot be described", run.dir)
        message = f"{type(error).__name__}: {error}"
        return {"name": run.name, "path": str(run.dir), "state": "damaged", "error": message, "age_s": None}


async def _view(request: web.Request) -> web.Response:
    """Every address of this page that a script may read, and its parameters."""
    return _json(routes.described())


async def _image(request: web.Request) -> web.Response:
    """An image of a run, always as PNG: it is made from the patches in the ledger."""
    run = await _run_of(request)
    png = await asyncio.to_thread(conversation.picture, run, request.match_info["hash"])
    return web.Response(body=png, content_type="image/png")


def _answering(route: routes.Route) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        run = await _run_of(request)
        check_names(request.query, route.parameters)
        return await asyncio.to_thread(lambda: _json(route.answer(run, request.query)))

    return handler


def _sending(name: str, file: export.File) -> Handler:
    """A handler that sends a file to be saved."""

    async def handler(request: web.Request) -> web.Response:
        run = await _run_of(request)
        check_names(request.query, file.parameters)
        body = await asyncio.to_thread(file.write, run, request.query)
        saved = re.sub(r"[^\w.-]", "_", f"{run.name}-{name}", flags=re.ASCII)
        headers = {"Content-Disposition": f'attachment; filename="{saved}"'}
        return web.Response(
            body=body.encode("utf-8", "replace"), content_type=file.content_type, charset="utf-8", headers=headers
        )

    return handler


async def _run_of(request: web.Request) -> OpenRun:
    """Raises: DataError if there is no such run."""
    run = await asyncio.to_thread(request.app[LIBRARY].get, request.match_info["run"])
    if run is None:
        raise DataError(f"there is no run {request.match_info['run']!r}; it may have been deleted.")
    return run


def _json(value: Any, status: int = 200) -> web.Response:
    try:
        body = msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        body = msgspec.json.encode(_encodable(value), enc_hook=_plain)
    return web.Response(body=body, status=status, content_type="application/json")


def _encodable(value: Any) -> Any:
    """The same with `?` for halves of characters, which a file in JSON may have and no text in UTF-8 can."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's, anything else as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


# -- a chat --


async def _chatting(app: web.Application) -> AsyncIterator[None]:
    """Ends the chat's engine when it is idle, and with the page."""
    waiting = asyncio.create_task(app[CHAT].close_idle())
    yield
    waiting.cancel()
    await app[CHAT].close()


async def _chat_of(request: web.Request) -> tuple[chat.Chat, OpenRun, list[str]]:
    """The chat, the run, and the runs that go on. Raises: ConfigError if this page has no chat."""
    run = await _run_of(request)
    if CHAT not in request.app:
        raise ConfigError(chat.OFF.format(run=run.dir))
    runs = await asyncio.to_thread(request.app[LIBRARY].runs)
    return request.app[CHAT], run, await asyncio.to_thread(chat.running, runs)


async def _chat_places(request: web.Request) -> web.Response:
    if CHAT not in request.app:
        run = await _run_of(request)
        return _json({"is_on": False, "why": chat.OFF.format(run=run.dir)})
    talking, run, others = await _chat_of(request)
    return _json(await talking.places(run, others))


async def _chat_start(request: web.Request) -> web.Response:
    talking, run, others = await _chat_of(request)
    return _json(await talking.start(run, await _words_of(request), others))


async def _chat_reply(request: web.Request) -> web.StreamResponse:
    talking, run, others = await _chat_of(request)
    pieces = talking.reply(run, await _words_of(request), others)
    first = await anext(pieces, b"")  # an engine that refuses says so before the answer begins
    answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(first)
    try:
        async for piece in pieces:
            await answer.write(piece)
    except EngineError as error:
        await answer.write(b"data: " + msgspec.json.encode({"error": str(error)}) + b"\n\n")
    return answer


async def _words_of(request: web.Request) -> dict[str, Any]:
    try:
        words = await request.json()
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from error
    if not isinstance(words, dict):
        raise ConfigError("the body must be a JSON object.")
    return words


# -- what has changed --


async def _changes(request: web.Request) -> web.StreamResponse:
    """Server-sent events: {run, subjects} whenever files of a run have changed."""
    answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
    await answer.prepare(request)
    with suppress(ConnectionError):  # the browser has disconnected
        await _send_changes(answer, request.app[STAMPS])
    return answer


async def _send_changes(answer: web.StreamResponse, cached_stamps: _Cached) -> None:
    known: dict[str, dict[str, str]] = {}
    silent_s = 0.0
    while True:
        stamps = await cached_stamps.get()
        for name in stamps.keys() | known.keys():
            old, new = known.get(name, {}), stamps.get(name, {})
            if subjects := [subject for subject in new.keys() | old.keys() if old.get(subject) != new.get(subject)]:
                data = msgspec.json.encode({"run": name, "subjects": subjects}).decode()
                await answer.write(f"data: {data}\n\n".encode())
                silent_s = 0.0
        known, silent_s = stamps, silent_s + POLL_S
        if silent_s >= _PING_S:  # only writing shows that a connection is closed
            await answer.write(b": still here\n\n")
            silent_s = 0.0
        await asyncio.sleep(POLL_S)
