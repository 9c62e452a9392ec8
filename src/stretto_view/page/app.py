"""The HTTP routes of the page: files of the page itself, JSON about runs, and a stream of what has changed.

Requests only read. Answers are computed in threads, so that a slow one does not delay the others. Text of rollouts is
untrusted: it is sent as JSON and inserted into the page as text, never as markup, and the content security policy
allows only the page's own files to run.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import resources
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from stretto.api import state
from stretto.base.errors import ConfigError, StrettoError, reason_of
from stretto.base.ports import refusal_of
from stretto.ledger.reader import LedgerReader
from stretto_view.page import conversation, curves, logs, now, rollouts, timeline
from stretto_view.page.library import Library, OpenRun

logger = logging.getLogger(__name__)

LIBRARY = web.AppKey("library", Library)
TOKEN = web.AppKey("token", str)
"""The token that a request must have; "": none is needed, and only this machine is served."""
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


def build(library: Library, token: str = "") -> web.Application:
    """The application; with a token, requests without it are refused."""
    app = web.Application(middlewares=[_guard])
    app[LIBRARY], app[TOKEN] = library, token
    app[STAMPS] = _Cached(lambda: {name: run.stamp() for name, run in library.runs().items()})
    app.router.add_get("/", _page)
    app.router.add_get("/static/{name}", _static)
    app.router.add_get("/api/runs", _runs)
    app.router.add_get("/api/changes", _changes)
    app.router.add_get("/api/run/{run}/image/{hash:[0-9a-f]{32}}", _image)
    for name, answer in ROUTES_PER_RUN.items():
        app.router.add_get(f"/api/run/{{run}}/{name}", _answering(answer))
    return app


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[TOKEN]
    if token:
        if "token" in request.query and hmac.compare_digest(request.query["token"].encode(), token.encode()):
            found = web.HTTPFound("/")  # without the token, so that the browser's history does not keep it
            found.set_cookie(cookie(token), token, httponly=True, samesite="Strict")
            raise found
        if not hmac.compare_digest(request.cookies.get(cookie(token), "").encode(), token.encode()):
            raise web.HTTPUnauthorized(text="open the address that `stretto view` printed: it ends with ?token=...\n")
    if refused := refusal_of(request.method, request.headers, has_key=bool(token)):
        return web.Response(status=refused[0], text=refused[1] + "\n")
    answer: web.StreamResponse
    try:
        answer = await handler(request)
    except (web.HTTPException, ConnectionError):  # raised by aiohttp, or the browser has disconnected
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
    rows = await asyncio.to_thread(lambda: [{"id": name, **state.describe(run.dir)} for name, run in found.items()])
    return _json(rows)


async def _image(request: web.Request) -> web.Response:
    """An image of a run, always as PNG: it is made from the patches in the ledger."""
    run = await asyncio.to_thread(request.app[LIBRARY].get, request.match_info["run"])
    if run is None:
        raise web.HTTPNotFound()
    png = await asyncio.to_thread(conversation.picture, run, request.match_info["hash"])
    return web.Response(body=png, content_type="image/png")


def _answering(answer: Callable[[OpenRun, Any], Any]) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        run = await asyncio.to_thread(request.app[LIBRARY].get, request.match_info["run"])
        if run is None:
            return _json(
                {"error": f"there is no run {request.match_info['run']!r}; it may have been deleted."}, status=404
            )
        return await asyncio.to_thread(lambda: _json(answer(run, request.query)))

    return handler


def _metrics(run: OpenRun, query: Any) -> Any:
    return curves.names(run.rows())


def _curve(run: OpenRun, query: Any) -> Any:
    if (axis := query.get("axis", "step")) not in curves.AXES:
        raise ConfigError(f"axis {axis!r}: the axes are {', '.join(curves.AXES)}.")
    smooth, points = (_number(query, "smooth", float) or 0.0, _number(query, "points", int) or curves.MOST_POINTS)
    rows = run.rows()
    keys = query.getall("key", [])
    return {key: curves.curve(rows, key, axis=axis, smooth=smooth, points=max(10, points)) for key in keys}


def _rollouts(run: OpenRun, query: Any) -> Any:
    filters = rollouts.Filters(
        step=_number(query, "step", int),
        env=query.get("env") or None,
        status=query.get("status") or None,
        min_reward=_number(query, "min_reward", float),
        max_reward=_number(query, "max_reward", float),
        min_tokens=_number(query, "min_tokens", int),
        max_tokens=_number(query, "max_tokens", int),
        version=_number(query, "version", int),
        sort=query.get("sort") or "newest",
    )
    if not run.dir.ledger.exists():
        return {"rows": [], "next": None, "searched": 0, "choices": None}
    with LedgerReader(run.dir) as ledger:
        found = rollouts.page(ledger, filters, before=_number(query, "before", int))
        return {**found, **({} if "before" in query else {"choices": rollouts.choices(ledger)})}


def _rollout(run: OpenRun, query: Any) -> Any:
    group, member = _number(query, "group", int), _number(query, "member", int)
    if group is None or member is None:
        raise ConfigError("a request for a rollout needs the numbers `group` and `member`.")
    return conversation.conversation(run, group, member)


def _evals(run: OpenRun, query: Any) -> Any:
    if (version := _number(query, "version", int)) is not None:
        return run.eval_samples(version)[: rollouts.PAGE * 10]
    return run.evals()


def _logs(run: OpenRun, query: Any) -> Any:
    if (level := query.get("level") or "debug") not in logs.LEVELS:
        raise ConfigError(f"level {level!r}: the levels are {', '.join(logs.LEVELS)}.")
    found = logs.merged(
        run.dir,
        processes=query.getall("process", []),
        level=level,
        text=query.get("text", ""),
        before=_number(query, "before", float),
    )
    return {**found, "processes": list(logs.files(run.dir))}


ROUTES_PER_RUN: dict[str, Callable[[OpenRun, Any], Any]] = {
    "now": lambda run, query: now.now(run),
    "metrics": _metrics,
    "curve": _curve,
    "rollouts": _rollouts,
    "rollout": _rollout,
    "timeline": lambda run, query: timeline.timeline(
        run, start=_number(query, "start", float), end=_number(query, "end", float)
    ),
    "evals": _evals,
    "config": lambda run, query: _flat(run.config),
    "logs": _logs,
}


def _number(query: Any, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the query; None if it is missing. Raises: ConfigError if it is not a finite number."""
    text = query.get(name)
    if text in (None, ""):
        return None
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) >= 2**62:
        raise ConfigError(f"{name}: {text!r} is not a number.")
    return value


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    """Every value of a config by its dotted key."""
    if isinstance(config, dict) and (config or not path):
        found: dict[str, Any] = {}
        for key, value in config.items():
            found |= _flat(value, f"{path}.{key}" if path else key)
        return found
    return {path: config}


def _json(value: Any, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value, enc_hook=_plain)
    return web.Response(body=body, status=status, content_type="application/json")


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's, anything else as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


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
