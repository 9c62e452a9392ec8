"""HTTP requests to engines and routers: one attempt each, and what its failure means."""

from __future__ import annotations

import os
from collections.abc import Mapping

import aiohttp

from stretto.base.errors import EngineError, reason_of
from stretto.base.runtime import raise_file_limit
from stretto.transports.engine import api

_TRY_AGAIN = (408, 409)
"""408: timed out on the way; 409: the engine has not noticed yet that the request's last connection is closed."""
_REFUSED = (400, 413, 422)
KEEP_ALIVE_S = 3.0
"""Seconds for which an idle connection is reused: vLLM closes one after 5 s, and a POST on its way then is lost."""
_NO_ENGINE = (b"Model not found", b"no generate-capable model is registered")
"""In answers of routers that have no engine for a request."""


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


class Connections:
    """Connections to engines, and to a router if `has_router`; every request has these headers."""

    def __init__(self, headers: Mapping[str, str], *, has_router: bool) -> None:
        self._headers, self._has_router = headers, has_router
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """The body of the answer to one attempt, if its status is 200.

        Raises: Transient, Unavailable or Full when another attempt may succeed; RequestRefused or EngineError with the
        server's message when the request itself is wrong.
        """
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
        if response.status == 200:
            return data
        message = f"{url}: HTTP {response.status}: {api.error_message(data)}"
        # Dynamo's frontend does not know the model while it has no engine, and lists it before it can serve it.
        has_no_engine = self._has_router and response.status == 404 and any(text in data for text in _NO_ENGINE)
        if response.status in (429, 503) or has_no_engine:
            busy = Full(message) if response.status == 429 else Unavailable(message)
            busy.wait_s = _seconds(response.headers.get("Retry-After"))
            raise busy
        if response.status in _TRY_AGAIN or response.status >= 500:
            raise Transient(message)
        raise (RequestRefused if response.status in _REFUSED else EngineError)(message)

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
