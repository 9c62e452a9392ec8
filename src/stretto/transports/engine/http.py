"""HTTP requests to engines and routers: one attempt each, and what its failure means."""

from __future__ import annotations

import os
from collections.abc import Mapping

import aiohttp

from stretto.base.errors import EngineError, reason_of
from stretto.base.runtime import raise_file_limit
from stretto.transports.engine import api
from stretto.transports.engine.connection import (
    KEEP_ALIVE_S,
    Answer,
    NotConnected,
    Pool,
    Target,
    Unreadable,
    are_plain,
    target_of,
)

BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
_TRY_AGAIN = (408, 409)
"""408: timed out on the way; 409: the engine has not noticed yet that the request's last connection is closed."""
_REFUSED = (400, 413, 422)
_NO_ENGINE = (b"Model not found", b"no generate-capable model is registered")
"""In answers of routers that have no engine for a request."""


def backoff_s(attempt: int) -> float:
    """Seconds to wait after a failed attempt, counted from 0."""
    return min(BACKOFF_S * 2.0 ** min(attempt, 99), _MAX_BACKOFF_S)  # a full server may be waited for without end


class RequestRefused(EngineError):
    """An engine refuses a request because of its content, and would refuse it again."""


class Transient(Exception):
    """An attempt failed because of the infrastructure; it can be repeated."""

    wait_s: float | None = None
    """How long the server asks to wait."""


class Lost(Transient):
    """The connection broke, or there was none: the server may have died, and another may have its address now."""


class Unavailable(Transient):
    """No engine is available at the moment; wait, without counting an attempt."""


class Full(Transient):
    """The engine accepts no more requests at the moment."""


_MOVED = (301, 302, 303, 307, 308)


class Connections:
    """Connections to engines, and to a router if `has_router`; every request has these headers.

    A request with a body goes over connection.py's connections; what these cannot do, aiohttp does.
    """

    def __init__(self, headers: Mapping[str, str], *, has_router: bool) -> None:
        self._headers, self._has_router = headers, has_router
        self._names = {name.lower() for name in headers}
        self._pool = Pool()
        self._targets: dict[str, Target | None] = {}  # by URL; None: aiohttp's
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """The body of the answer to one attempt, if its status is 200.

        Raises: Transient, Unavailable or Full when another attempt may succeed; RequestRefused or EngineError with the
        server's message when the request itself is wrong.
        """
        target = self._target(url) if body is not None and method == "POST" else None
        if target is None or body is None or (headers and not are_plain(headers, self._names)):
            answer = await self._ask_session(method, url, body, headers)
        else:
            try:
                answer = await self._pool.post(target, headers or {}, body)
            except (OSError, Unreadable) as error:
                raise self._lost(url, error) from error
            if answer.status in _MOVED or "set-cookie" in answer.headers:
                self._targets[url] = None  # from now on
                if answer.status in _MOVED:
                    answer = await self._ask_session(method, url, body, headers)
        if answer.status == 200:
            return answer.body
        raise self._error(url, answer)

    def _target(self, url: str) -> Target | None:
        if url not in self._targets:
            raise_file_limit()
            self._targets[url] = target_of(url, self._headers)
        return self._targets[url]

    def _lost(self, url: str, error: OSError | Unreadable) -> Lost:
        """What the end of a connection before its answer means."""
        if isinstance(error, Unreadable):
            self._targets[url] = None  # from now on: aiohttp reads more
            return Lost(f"{url}: the answer cannot be read: {error}")
        if isinstance(error, NotConnected):
            number = error.errno or 0  # a name that is not known has another table of numbers
            why = os.strerror(number).lower() if number > 0 else reason_of(error.cause)
            return Lost(f"{url}: cannot connect: {why}")
        return Lost(f"{url}: {error}")

    async def _ask_session(self, method: str, url: str, body: bytes | None, headers: dict[str, str] | None) -> Answer:
        """The answer to any request. Raises: Lost; EngineError for a wrong address."""
        session = self._open()
        try:
            async with session.request(method, url, data=body, headers=headers) as response:
                data = await response.read()
        except (aiohttp.TooManyRedirects, aiohttp.InvalidURL) as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}; correct the address") from error
        except aiohttp.ClientConnectorError as error:
            number = error.errno or 0  # asyncio's text repeats the address; a name that is not known has another table
            why = os.strerror(number).lower() if number > 0 else reason_of(error.os_error)
            raise Lost(f"{url}: cannot connect: {why}") from error
        except (aiohttp.ClientError, ConnectionError) as error:  # also an answer that is no HTTP
            raise Lost(f"{url}: {type(error).__name__}: {error}") from error
        return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, data)

    def _error(self, url: str, answer: Answer) -> Exception:
        """What an answer with another status than 200 means."""
        message = f"{url}: HTTP {answer.status}: {api.error_message(answer.body)}"
        # Dynamo's frontend does not know the model while it has no engine, and lists it before it can serve it.
        has_no_engine = self._has_router and answer.status == 404 and any(text in answer.body for text in _NO_ENGINE)
        if answer.status in (429, 503) or has_no_engine:
            busy = Full(message) if answer.status == 429 else Unavailable(message)
            busy.wait_s = _seconds(answer.headers.get("retry-after"))
            return busy
        if answer.status in _TRY_AGAIN or answer.status >= 500:
            return Transient(message)
        return (RequestRefused if answer.status in _REFUSED else EngineError)(message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise_file_limit()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return self._session

    async def close(self) -> None:
        self._pool.close()
        if self._session is not None:
            await self._session.close()
            self._session = None


def _seconds(text: str | None) -> float | None:
    """The value of a header Retry-After in seconds; None for none, and for a date."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
