"""The boundary of an HTTP request: API key, size of the body, and the answer after an exception.

A Refusal is answered with its status, any other exception with a 500 and the request's id; none of them reaches the
engine. server.py and vllm/guard.py both check the key with `is_allowed`.
"""

from __future__ import annotations

import hmac
import logging
import os
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stretto.base.errors import StrettoError
from stretto.base.ports import refusal_of
from stretto.config.sections.engines import ADMITTED
from stretto.records.images import Image
from stretto.transports.engine import api
from stretto.transports.engine.api import EngineStopping, Refusal
from stretto.transports.engine.images import VisionSizes

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({api.HEALTH, api.LIVENESS, ADMITTED})
"""Routes that need no key: supervisors and routers call them."""
GENERATING = frozenset({api.GENERATE, api.COMPLETIONS, api.CHAT_COMPLETIONS, api.CLASSIFY})
"""Routes whose requests may have to wait."""
NO_KEY = "the API key is missing or wrong; send `Authorization: Bearer <key>`"
MAX_ADMIN_BYTES = 64 << 20  # a manifest of 400,000 tensors
MAX_SETTINGS_BYTES = 1 << 20
"""Size of a body without its prompts."""
_HOLD: web.RequestKey[Callable[[int], None]] = web.RequestKey(
    "hold"
)  # tells OpenBytes the size of a request for tokens
_ID_BYTES = 12  # a token id in JSON, with its separator
_MAX_ESCAPED_BYTES = 6  # JSON for one byte of text
_MAX_ID_CHARACTERS = 128


def is_allowed(path: str, authorization: bytes, key: str | None) -> bool:
    """Whether a request is allowed: the route is open, no key is set, or the right key was sent."""
    if key is None or path in OPEN_ROUTES:
        return True
    scheme, _, sent = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), key.encode())


def check_origin(method: str, headers: Mapping[str, str], key: str | None) -> None:
    """Raises: Refusal for a request of another site's page in a browser; see `base.origin`."""
    if refused := refusal_of(method, headers, has_key=key is not None, is_ip_enough=True):
        raise Refusal(refused[1], refused[0])


def max_body_bytes(max_model_len: int, token_bytes: int | None = None, vision: VisionSizes | None = None) -> int:
    """The largest body of a route, in bytes.

    token_bytes: bytes of the longest token, for prompts as text. vision: for a model with images, of which every token
    may be one.
    """
    per_token = _ID_BYTES if token_bytes is None else max(_ID_BYTES, _MAX_ESCAPED_BYTES * token_bytes)
    per_token += 0 if vision is None else vision.bytes_per_token
    return 4 * MAX_SETTINGS_BYTES + per_token * max_model_len


class OpenBytes:
    """Counts the bytes of a server's open requests and limits them, so that waiting images do not fill the memory."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
        self.num_bytes = 0

    @contextmanager
    def request(self, declared: int | None) -> Iterator[Callable[[int], None]]:
        """Count a request until its end; yields a function that sets its number of bytes.

        declared: its Content-Length. Raises: Refusal 429 if all open requests would have too many bytes.
        """
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            others = self.num_bytes - held
            if num_bytes > held and others and others + num_bytes > self.max_bytes:
                raise Refusal(
                    f"open requests have {others} bytes and this one {num_bytes}, and {self.max_bytes} may be open "
                    "(server.max_open_bytes); try again later",
                    429,
                )
            self.num_bytes, held = others + num_bytes, num_bytes

        try:
            hold(declared or 0)
            yield hold
        finally:
            self.num_bytes -= held

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count requests for tokens."""
        if request.path not in GENERATING:
            return await handler(request)
        with self.request(request.content_length) as request[_HOLD]:
            return await handler(request)


def hold_pixels(http: web.Request, images: Iterable[Image], *, body_bytes: int = 0) -> None:
    """Count a request's pixels instead of its body. Raises: Refusal 429 as OpenBytes.request does."""
    if pixels := sum(image.patches.nbytes for image in images if image.patches is not None):
        http[_HOLD](body_bytes + pixels)


async def read_body(http: web.Request, limit: int) -> bytes:
    """Read the request's body.

    Raises: Refusal 413 if it is larger than `limit` bytes, 400 or 415 if it cannot be read, 429 as OpenBytes.request.
    """
    data, hold = bytearray(), http.get(_HOLD, lambda _: None)
    too_large = Refusal(f"the body has more than {limit} bytes, the limit of this route", 413)
    try:
        async for chunk in http.content.iter_any():
            data += chunk
            if len(data) > limit:
                raise too_large
            if http.content_length is None:
                hold(len(data))
    except web.RequestPayloadError as error:
        raise Refusal(f"the body cannot be read: {error.__cause__ or error}") from error
    encoding = http.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return bytes(data)
    if encoding not in ("gzip", "deflate"):
        raise Refusal(f"Content-Encoding: {encoding!r} is not supported; use gzip or deflate", 415)
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # accepts both headers
    try:
        body = decompressor.decompress(bytes(data), limit + 1)
    except zlib.error as error:
        raise Refusal(f"the body cannot be read: it does not have its Content-Encoding: {error}") from error
    if len(body) > limit:
        raise too_large
    hold(len(data) + len(body))
    if not decompressor.eof:
        raise Refusal("the body cannot be read: its compressed data is cut off")
    return body


class _ClientErrorFilter(logging.Filter):
    """Drops aiohttp's tracebacks of requests that are not valid HTTP, which have been answered."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


RUNNER_SETTINGS: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False}
"""aiohttp's settings for our app; `read_body` decompresses bodies, because their size is limited there."""
_CLIENT_ERROR_FILTER = _ClientErrorFilter()


def build_app(key: str | None, max_open_bytes: int | None = None) -> web.Application:
    """Build an app whose routes are all behind this boundary."""
    logging.getLogger("aiohttp.server").addFilter(_CLIENT_ERROR_FILTER)
    return web.Application(client_max_size=0, middlewares=[middleware(key), OpenBytes(max_open_bytes).middleware])


def middleware(key: str | None) -> Middleware:
    """Build the middleware that checks the key and answers every exception."""

    @web.middleware
    async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            authorization = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not is_allowed(request.path, authorization, key):
                raise Refusal(NO_KEY, 401)
            check_origin(request.method, request.headers, key)
            return await handler(request)
        except Refusal as refusal:
            return _refusal_response(refusal)
        except web.HTTPException as error:  # no such route, or not with this method
            return _refusal_response(Refusal(f"{request.method} {request.path[:200]}: {error.reason}", error.status))
        except ConnectionError as error:
            logger.debug("%s %s: the caller has disconnected: %s", request.method, request.path, error)
            return web.Response(status=499)
        except EngineStopping as error:
            logger.info("%s %s: %s", request.method, request.path, error)
            return _refusal_response(Refusal(str(error), 500))
        except StrettoError as error:
            logger.error("%s %s: %s", request.method, request.path, error)
            return _refusal_response(Refusal(str(error), 500))
        except Exception as error:  # any other is a mistake of ours; the server goes on
            request_id = _request_id(request)
            logger.exception("%s %s failed, request %s", request.method, request.path, request_id)
            message = f"internal error in request {request_id}: {type(error).__name__}: {error}"
            return _refusal_response(Refusal(message, 500))

    return boundary


def _request_id(http: web.Request) -> str:
    """The caller's id of the request if it is safe to log, else a new one."""
    name = http.headers.get("X-Request-Id", "")
    is_plain = name.isascii() and name.isprintable() and 0 < len(name) <= _MAX_ID_CHARACTERS
    return name if is_plain else uuid4().hex


def _refusal_response(refusal: Refusal) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
    return json_response(refusal.body(), refusal.status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A response with this body as JSON; bytes are JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)
