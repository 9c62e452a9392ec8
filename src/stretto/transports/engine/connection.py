"""Posts bodies over kept HTTP/1.1 connections, at a few tens of microseconds each: thousands of requests run at once.

Only what an engine or a router beside the run needs: plain http, addresses without passwords, answers that are whole
bodies. What needs more (TLS, redirects, cookies) is aiohttp's (http.py), which takes several times the CPU per request.
A connection has one request at a time. One that is not used for KEEP_ALIVE_S is closed, and so is one whose request is
cancelled: the engine then ends that request.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import itertools
import re
import socket
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools

KEEP_ALIVE_S = 3.0
"""Seconds for which an idle connection is reused: vLLM closes one after 5 s, and a POST on its way then is lost."""
_RESOLVE_S = 10.0  # for which the addresses of a name are kept
_RACE_S = 0.25  # head start of one address of a name before the next one is tried as well
_NOT_SENT = re.compile("[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")  # in names and values of headers
_SMALL = 1 << 16  # bytes; copying this much costs less than another system call
_OWN_HEADERS = frozenset(
    ("host", "connection", "content-length", "transfer-encoding", "accept", "accept-encoding", "expect", "user-agent")
)
"""Headers that this module sends itself."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    """By lower-case name; of several with one name the last."""
    body: bytes


class Target(NamedTuple):
    """Where requests to one URL go, and how they begin."""

    host: str
    port: int
    head: bytes


class NotConnected(OSError):
    """There is no connection; `cause` is the system's error."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.cause = cause


class Closed(ConnectionError):
    """The connection ended before the answer was there."""


class Unreadable(Exception):
    """The answer is no HTTP, or of a kind that only aiohttp reads."""


def target_of(url: str, headers: Mapping[str, str]) -> Target | None:
    """The target of POST requests with these headers; None if it needs more than this module can do."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        return None
    is_plain = parts.scheme == "http" and host and url.isascii() and "@" not in parts.netloc and not parts.fragment
    if not is_plain or any(c <= " " or c == "\x7f" for c in url) or not are_plain(headers):
        return None
    assert host is not None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Accept: */*", "Accept-Encoding: gzip"]
    lines += ["User-Agent: stretto", *(f"{name}: {value}" for name, value in headers.items())]
    return Target(host, port, "\r\n".join((*lines, "")).encode())


def are_plain(headers: Mapping[str, str], given: Collection[str] = ()) -> bool:
    """Whether this module sends such headers: none that it makes or that is given already, no control characters."""
    for name, value in headers.items():
        if _is_own(name) or (given and name.lower() in given) or _NOT_SENT.search(value):
            return False
    return True


@lru_cache(maxsize=256)
def _is_own(name: str) -> bool:
    """Whether a header's name is one that this module gives itself, or cannot send."""
    return name.lower() in _OWN_HEADERS or _NOT_SENT.search(name) is not None


class Pool:
    """Connections to any number of targets."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], deque[_Connection]] = defaultdict(deque)  # the newest last
        self._open: set[_Connection] = set()
        self._addresses: dict[tuple[str, int], _Addresses] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def post(self, target: Target, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to one request; `headers` are those that differ from request to request.

        Raises: NotConnected; another OSError if the connection ends before the answer is there; Unreadable.
        """
        own = ""
        for name, value in headers.items():
            own += f"{name}: {value}\r\n"
        head = b"%b%bContent-Length: %d\r\n\r\n" % (target.head, own.encode(), len(body))
        if (connection := self._reuse(target[:2])) is None:
            try:
                connection = await self._connect(target[:2])
            except OSError as error:
                raise NotConnected(error) from error
        try:
            answer = await connection.send(head, body)
        except BaseException:
            self._discard(connection)
            raise
        if connection.is_reusable:
            self._keep(target[:2], connection)
        else:
            self._discard(connection)
        return answer

    def close(self) -> None:
        """Close all connections; requests that run on them fail."""
        for connection in tuple(self._open):
            self._discard(connection)
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _reuse(self, place: tuple[str, int]) -> _Connection | None:
        """The connection that became idle last, if the server keeps it."""
        idle, oldest = self._idle.get(place), asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            self._discard(connection)
        return None

    def _keep(self, place: tuple[str, int], connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.rest(loop.time())
        self._idle[place].append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_idle, loop)

    def _close_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that have been idle for KEEP_ALIVE_S, as long as there are idle ones."""
        oldest = loop.time() - KEEP_ALIVE_S
        for place, idle in tuple(self._idle.items()):
            while idle and (idle[0].idle_since <= oldest or not idle[0].is_reusable):
                self._discard(idle.popleft())
            if not idle:
                del self._idle[place]
        self._sweep = loop.call_later(KEEP_ALIVE_S / 2, self._close_idle, loop) if self._idle else None

    def _discard(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.close()

    async def _connect(self, place: tuple[str, int]) -> _Connection:
        loop = asyncio.get_running_loop()
        if (known := self._addresses.get(place)) is None or known.until < loop.time():
            found = asyncio.ensure_future(_look_up(*place))
            known = self._addresses[place] = _Addresses(found, loop.time() + _RESOLVE_S, itertools.count())
        try:
            infos = await asyncio.shield(known.found)
        except OSError:
            if self._addresses.get(place) is known:
                del self._addresses[place]  # the next request asks again
            raise
        # Each connection begins at another address, so that all servers behind a name get requests.
        first = next(known.turn) % len(infos)
        infos = [(*each[:3], "", each[4]) for each in infos[first:] + infos[:first]]
        sock = await aiohappyeyeballs.start_connection(infos, happy_eyeballs_delay=_RACE_S, interleave=1)
        try:
            _, connection = await loop.create_connection(_Connection, sock=sock)
        except BaseException:
            sock.close()
            raise
        self._open.add(connection)
        return connection


async def _look_up(host: str, port: int) -> list[tuple[Any, ...]]:
    """The addresses of a host. A name waits for one of the loop's threads, which a user's code may all occupy."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return list(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))


class _Addresses(NamedTuple):
    """What a name means, for some seconds."""

    found: asyncio.Future[list[tuple[Any, ...]]]
    until: float
    turn: itertools.count[int]


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None  # of the request that is under way
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._has_head = False
        self.is_reusable = True
        self.idle_since = 0.0

    def send(self, head: bytes, body: bytes) -> asyncio.Future[Answer]:
        """Send a request; its answer will be there."""
        assert self._transport is not None and self._answer is None
        if not self.is_reusable:
            raise Closed("the server closed the connection at once")
        self._answer = self._loop.create_future()
        if len(body) < _SMALL:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return self._answer

    def rest(self, now: float) -> None:
        """It is idle from now on, and holds no answer, which may be megabytes."""
        self.idle_since, self._answer = now, None

    def close(self) -> None:
        """Close the connection at once; what it has not sent yet is not sent."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- what the transport calls --

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # nobody has asked
            return self.close()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__ or error  # what a method below has raised
            self._fail(cause if isinstance(cause, Unreadable) else Unreadable(f"it is no HTTP: {cause}"))

    def eof_received(self) -> None:
        """The server sends no more: the end of an answer that has no length."""
        self.is_reusable = False
        if self._has_head and not {"content-length", "transfer-encoding"} & self._headers.keys():
            try:
                self.on_message_complete()
            except Unreadable as error:
                self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        self._fail(Closed("the connection was closed before the answer came" if error is None else str(error)))

    def _fail(self, error: Exception) -> None:
        self.is_reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # -- what the parser calls --

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.done():  # its rest may come when there is another request
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else it is a trailer
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        status, headers, parts = self._parser.get_status_code(), self._headers, self._parts
        self._headers, self._parts, self._has_head = {}, [], False
        if status < 200:  # 100 Continue: the answer follows
            return
        if self._answer is None or self._answer.done():  # a second answer, to no request
            return
        assert self._transport is not None
        # A server that answers early may never read the rest of the request, nor what would be sent behind it.
        is_sent = not self._transport.get_write_buffer_size()
        self.is_reusable = self.is_reusable and is_sent and self._parser.should_keep_alive()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if body and "content-encoding" in headers:
            body = _decoded(body, headers["content-encoding"].strip().lower())
        self._answer.set_result(Answer(status, headers, body))


def _decoded(body: bytes, encoding: str) -> bytes:
    """The body before it was packed. Raises: Unreadable."""
    if encoding not in ("", "identity", "gzip"):
        raise Unreadable(f"its encoding is {encoding}")
    try:
        return gzip.decompress(body) if encoding == "gzip" else body
    except (zlib.error, EOFError, OSError) as error:
        raise Unreadable(f"it cannot be unpacked: {error}") from error
