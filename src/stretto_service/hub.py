"""What all routes share: the parts of the service, access to records, and answers to requests that fail.

`Hub` finds records for a user and refuses those of others. `boundary` is the only place where exceptions become
answers; it writes every action and its outcome to the audit log.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.base.ports import refusal_of
from stretto.data.hub_model import find_config, find_local
from stretto.records.generate import GenerateRequest
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal
from stretto_service.access import Access, Reading, User
from stretto_service.config import ServeConfig
from stretto_service.engines import Engines
from stretto_service.futures import Futures, without_paths
from stretto_service.store import MAX_RECORD_BYTES, MAX_USER_BYTES, Audit, Checkpoint, Run, Sampler, Session, Store
from stretto_service.training.checkpoints import Checkpoints
from stretto_service.training.training import Training
from stretto_service.wires.operations import TenantSpec

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
"""Largest body of a route that takes tensors or tokens, decompressed."""
MAX_PLAIN_BYTES = 1 << 20
"""Largest body of any other route, decompressed; reading more JSON than this would delay the requests of all users."""
BYTES_PER_TOKEN = 24
"""A request for samples may have so many bytes more for each token of the longest sequence."""
VALUES_PER_TOKEN = 4
"""A request for samples with images may be as large as one that trains, but has no more values than these per token."""
_LARGE = ("/forward", "/forward_backward", "/batch", api.GENERATE)
_SAMPLES = "/asample"
OPEN_ROUTES = frozenset({"/health", "/api/v1/healthz"})
QUIET_ROUTES = frozenset(
    {
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/session_heartbeat",
        "/api/v1/telemetry",
        "/api/v1/asample",
        "/api/v1/client/config",
        "/api/v1/client/dynamic_config",
        "/v1/status",
    }
)
"""Routes whose successes are not written to the audit log: they only read, or are called thousands of times."""
QUIET_PREFIXES = ("/runs/", "/v1/futures/")
"""Prefixes of further quiet routes: engines' routes for orchestrators, and waits for results."""

USER = web.RequestKey("user", User)
"""The sender of a request."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Hub:
    """The parts of a service, and its records as users may see them."""

    cfg: ServeConfig
    store: Store
    futures: Futures
    audit: Audit
    access: Access
    training: Training
    engines: Engines
    reading: Reading
    vocab_size: int
    max_model_len: int
    started_at: float

    @property
    def checkpoints(self) -> Checkpoints:
        return self.training.checkpoints

    @property
    def model_name(self) -> str:
        return self.cfg.model.name

    @property
    def tokenizer_id(self) -> str:
        """Where clients find the tokenizer: a directory of this machine, or a name on the Hub."""
        name = self.cfg.tokenizer.name or self.cfg.model.name
        local = Path(name).expanduser()
        return str(local.resolve()) if local.is_dir() else name

    def check_model(self, name: str | None) -> None:
        """Raises: Refusal 400 for another model than the one that is served."""
        directory = find_local(self.model_name)
        names = {self.model_name, self.cfg.inference.served_model_name, self.tokenizer_id, str(directory)}
        if name is not None and name not in names:
            raise Refusal(f"base_model: {name!r} is not served here; this service has {self.model_name!r}")

    def largest_body(self, path: str) -> int:
        """Most bytes of a body at this path, decompressed."""
        if path.endswith(_LARGE):
            return MAX_BODY_BYTES
        if path.endswith(_SAMPLES):
            return min(MAX_BODY_BYTES, MAX_PLAIN_BYTES + BYTES_PER_TOKEN * self.max_model_len)
        return MAX_PLAIN_BYTES

    async def close(self) -> None:
        """Write the usage and close all files and connections."""
        await self.engines.client.close()
        self.training.meter.write()
        self.store.close()
        self.audit.close()

    def session(self, user: User, name: str | None) -> Session:
        return _owned(self.store.get(Session, name or ""), user, f"session {name!r}")

    def run(self, user: User, name: str) -> Run:
        return _owned(self.store.get(Run, name), user, f"training run {name!r}")

    def sampler(self, user: User, name: str | None) -> Sampler:
        return _owned(self.store.get(Sampler, name or ""), user, f"sampling session {name!r}")

    def records_of(self, kind: type[Any], user: User) -> list[Any]:
        """The records of a kind that a user may access, the newest first."""
        return [record for record in self.store.all(kind) if user.may_access(record.owner)][::-1]

    def new_run(self, user: User, name: str, spec: TenantSpec, **settings: Any) -> Run:
        """A run of this user that begins now, with the user's share of the trainer; settings: further ones of `Run`."""
        now = time.time()
        run = Run(
            id=name,
            owner=user.name,
            spec=spec,
            base_model=self.model_name,
            created_at=now,
            last_request_at=now,
            weight=user.section.weight,
            priority=user.section.priority,
            tokens_per_minute=user.section.tokens_per_minute,
            **settings,
        )
        self.check_room(run)
        return run

    def check_room(self, record: Session | Run | Sampler) -> None:
        """Raises: Refusal 413 for a new record that is too large, or one more of a user who has no room left."""
        if (num_bytes := len(msgspec.json.encode(record))) > MAX_RECORD_BYTES:
            raise Refusal(
                f"the names, tags and metadata of a {type(record).__name__.lower()} have {num_bytes} bytes; at most "
                f"{MAX_RECORD_BYTES} are kept, so send less of them",
                413,
            )
        kept = self.store.user_bytes(record.owner)
        if kept + num_bytes > MAX_USER_BYTES:
            raise Refusal(
                f"the records of your sessions, runs, checkpoints and samplers have {kept} bytes, and at most "
                f"{MAX_USER_BYTES} are kept; delete checkpoints, or wait until unused records are deleted",
                413,
            )

    def checkpoint(self, user: User, path: str, kind: str | None = None) -> Checkpoint:
        """A checkpoint that this user may read. Raises: Refusal 404, or 400 for one of another kind."""
        found = self.store.get(Checkpoint, path)
        owner = found.owner if found is not None and user.is_admin else user.name
        return self.checkpoints.find(path, owner, kind)


def _owned(record: Any, user: User, what: str) -> Any:
    """Raises: Refusal 404 if there is none, 403 if it is another user's."""
    if record is None:
        raise Refusal(f"there is no {what}", 404)
    if not user.may_access(record.owner):
        raise Refusal(f"{what} belongs to another user", 403)
    return record


class Routes:
    """Handlers of one hub for some of its routes."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError


# -- requests and answers --


async def read(http: web.Request, kind: type[Any]) -> Any:
    """The JSON body. Raises: Refusal that names what does not fit."""
    return api.decode_json(await http.read() or b"{}", kind)


async def read_generate(http: web.Request, max_model_len: int) -> GenerateRequest:
    """The request for samples in a body. Raises: Refusal 400, or 413 for more values than a sequence can have."""
    body = await http.read()
    num_values, most = body.count(b",") + body.count(b"["), 100_000 + VALUES_PER_TOKEN * max_model_len
    if num_values > most:  # reading millions of them would delay the requests of all users
        raise Refusal(f"the body has {num_values} values, and a sequence of this model has less than {most}", 413)
    return api.decode_generate(body)[0]


def answer(body: object, status: int = 200) -> web.Response:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json")


def when(seconds: float | None) -> str | None:
    """A time as clients read it."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def boundary(hub: Hub) -> Middleware:
    """Build the middleware that checks the token and turns every exception into an answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        user: User | None = None
        refusal: Refusal | None = None
        try:
            if refused := refusal_of(request.method, request.headers, has_key=True):
                raise Refusal(refused[1], refused[0])
            # The address of a file for download is signed, so it needs no token.
            if request.path not in OPEN_ROUTES and not request.path.startswith("/download/"):
                user = hub.access.user(request.headers)
                request[USER] = user
            largest = hub.largest_body(request.path)
            size = body_size(request, largest)
            if size > largest:
                raise Refusal(_too_large(request, size, largest), 413)
            request = request.clone(client_max_size=largest)
            with hub.reading.body(user.name if user is not None else "", size):
                response = await handler(request)
                await hub.store.settled()
                return response
        except Refusal as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(_too_large(request, None, hub.largest_body(request.path)), 413)
        except web.HTTPException as error:
            refusal = Refusal(f"{request.method} {request.path[:200]}: {error.reason}", error.status)
        except web.RequestPayloadError as error:
            refusal = Refusal(f"the body cannot be read: {error.__cause__ or error}", 400)
        except ConnectionError:
            return web.Response(status=499)
        except sqlite3.Error as error:
            logger.error("%s %s: the records cannot be written: %s", request.method, request.path, error)
            why = without_paths(str(error))
            refusal = Refusal(f"the service cannot write its records ({why}); is its disk full?", 507)
        except StrettoError as error:
            level, status = (logging.INFO, 400) if isinstance(error, DataError | ConfigError) else (logging.ERROR, 500)
            logger.log(level, "%s %s: %s", request.method, request.path, error)
            refusal = Refusal(without_paths(str(error)), status)
        except Exception as error:  # any other is a mistake of ours; the service goes on
            name = uuid4().hex
            logger.exception("%s %s failed, request %s", request.method, request.path, name)
            why = without_paths(f"{type(error).__name__}: {error}")
            refusal = Refusal(f"internal error in request {name}: {why}", 500)
        finally:
            if (refusal is not None or not is_quiet(request.path)) and request.path not in OPEN_ROUTES:
                _write_audit(hub, request, user, refusal)
        # Clients of Tinker show `detail`.
        body = json.loads(refusal.body()) | {"detail": str(refusal)}
        return answer(body, refusal.status)

    return middleware


def _write_audit(hub: Hub, request: web.Request, user: User | None, refusal: Refusal | None) -> None:
    status = 200 if refusal is None else refusal.status
    details = {} if refusal is None else {"error": str(refusal)[:500]}
    action = f"{request.method} {request.path[:300]}"
    if user is None:
        hub.audit.write_stranger(action, request.remote or "", status=status, **details)
    else:
        hub.audit.write(user.name, action, request.remote or "", status=status, **details)


def body_size(http: web.Request, largest: int) -> int:
    """Bytes of the body; the largest possible size if it is compressed or the client does not say it."""
    if http.content_length is not None and "Content-Encoding" not in http.headers:
        return http.content_length
    return largest if http.can_read_body else 0


def _too_large(http: web.Request, size: int | None, largest: int) -> str:
    size_words = "more" if size is None else str(size)
    return (
        f"{http.method} {http.path[:200]}: the body has {size_words} bytes; this route takes at most {largest}, "
        "counted after decompression; send less at a time"
    )


def is_quiet(path: str) -> bool:
    """Whether the audit log leaves out successes at this path."""
    return path in QUIET_ROUTES or path in OPEN_ROUTES or path.startswith(QUIET_PREFIXES)


def page(http: web.Request, default: int = 20) -> tuple[int, int]:
    """offset and limit of a listing. Raises: Refusal if they are not such numbers."""
    try:
        offset, limit = int(http.query.get("offset", 0)), int(http.query.get("limit", default))
    except ValueError:
        raise Refusal("offset and limit must be numbers") from None
    if offset < 0 or not 0 < limit <= 1000:
        raise Refusal("offset must be at least 0, limit 1 to 1000")
    return offset, limit


def model_facts(cfg: ServeConfig) -> tuple[int, int]:
    """Size of the vocabulary and length of the longest sequence, from the model's config.json.

    Raises: ConfigError if there is none.
    """
    directory = find_config(cfg.model.name)
    if directory is None:
        raise ConfigError(f"[model] name = {cfg.model.name!r}: there is no config.json of this model")
    hf = json.loads((directory / "config.json").read_text())
    text = hf.get("text_config") or hf
    longest = text.get("max_position_embeddings") or math.inf
    limit = cfg.inference.max_model_len or longest
    return int(text["vocab_size"]), int(min(limit, longest, 1 << 30))


def texts(metadata: dict[str, Any]) -> dict[str, str] | None:
    """Metadata as clients read it."""
    return {key: str(value) for key, value in metadata.items()} or None
