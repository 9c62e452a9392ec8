"""The wire between a run and a training service: routes and bodies for both ends, and the client.

A run is made from a `TenantSpec`. Its requests are numbered from 1 and computed in order; each is answered at once with
an id, and `GET /v1/futures/<id>` waits for the result. Batches are records of the codec (records/codec.py), so that a
run sends the micro batches that it would send to a trainer of its own. `/v1/runs/<id>/inference/v1/generate` takes the
body of an engine's route and samples from the newest published version of the run's adapter.

    POST   /runs/check                       CheckRun              -> {user, model, state}, or why it is refused
    POST   /runs/<name>/end                                        -> {ended}
    POST   /v1/runs                          CreateRun             -> {id, request_id}
    GET    /v1/runs  /v1/runs/<id>                                 -> state, step, reason
    POST   /v1/runs/<id>/batch?seq=N         TenantWork (codec)    -> {request_id}; result: metrics
    POST   /v1/runs/<id>/step?seq=N          StepBody              -> result: metrics
    POST   /v1/runs/<id>/publish?seq=N       {"version": 3}        -> result: {"version": 3, "adapter": "..."}
    POST   /v1/runs/<id>/save?seq=N          {"name": "step_3", "progress": {...}}
    POST   /v1/runs/<id>/load?seq=N          {"name": "step_3", "optimizer": true}
    POST   /v1/runs/<id>/inference/v1/generate
    POST   /v1/runs/<id>/{freeze,resume,evict,end}
"""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec

from stretto.base.errors import ConfigError, EngineError
from stretto.base.ports import open_url
from stretto.config.sections.run import ServiceRunSection
from stretto.records.codec import BytesLike, decode, encode
from stretto.records.generate import Completion, GenerateRequest
from stretto.transports.engine import api
from stretto.transports.engine.completions import decode_completions
from stretto_service.wires.operations import AdamSettings, TenantSpec, TenantWork

CHECK = "/runs/check"
END_NAMED = "/runs/{run}/end"
RUNS = "/v1/runs"
FUTURES = "/v1/futures"
POLL_S = 20.0
_RETRY_S = 1.0
_TRIES = 300
_CHECK_TIMEOUT_S = 20.0


class CheckRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that may begin. tokenizer: digest of its tokenizer.json; may_exist: it continues or replaces one."""

    spec: TenantSpec
    base_model: str
    seq_len: int
    tokenizer: str | None = None
    may_exist: bool = False


class CreateRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new run. base_model: the model that the run expects, which the service checks.

    key: chosen by the client; a repeated request with the same key gets the same run.
    """

    spec: TenantSpec
    base_model: str
    key: str | None = None
    metadata: dict[str, Any] = {}


class StepBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """adam: settings of this step; None: the optimizer and schedule of the spec."""

    adam: AdamSettings | None = None


class PublishBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int


class SaveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    progress: dict[str, Any] = {}


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    optimizer: bool = True


def encode_work(work: TenantWork) -> bytes:
    """A batch as one body: its frames, each after its size."""
    return msgspec.msgpack.encode([bytes(frame) for frame in encode(work)])


def decode_work(body: bytes) -> TenantWork:
    """Raises: WireError if this is no batch."""
    try:
        frames: Sequence[BytesLike] = msgspec.msgpack.decode(body, type=list[bytes])
    except msgspec.DecodeError:
        frames = [body]
    return decode(frames, TenantWork)


class ServiceRun:
    """The run's end. It repeats a call while the service is away, which recognises the numbers of requests."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._headers = url.rstrip("/"), {"X-API-Key": token}
        self._session: aiohttp.ClientSession | None = None
        self._seq = 0
        self.id = ""

    async def create(self, body: CreateRun) -> dict[str, Any]:
        """Make the run, and wait until the trainer has its adapter. Raises: EngineError with the service's reason."""
        body = msgspec.structs.replace(body, key=body.key or uuid4().hex)
        answer = await self._call("POST", RUNS, msgspec.json.encode(body))
        self.id = answer["id"]
        return await self.wait(answer["request_id"])

    async def attach(self, run_id: str) -> dict[str, Any]:
        """Continue a run that the service has; returns its state."""
        self.id = run_id
        state = await self._call("GET", f"{RUNS}/{run_id}")
        self._seq = state["next_seq"] - 1
        return state

    async def submit(self, kind: str, body: bytes) -> str:
        """Send the next request; returns the id of its future."""
        self._seq += 1
        answer = await self._call("POST", f"{RUNS}/{self.id}/{kind}?seq={self._seq}", body)
        return str(answer["request_id"])

    async def wait(self, request_id: str) -> dict[str, Any]:
        """The result of a request. Raises: EngineError with the reason if it failed."""
        while True:
            answer = await self._call("GET", f"{FUTURES}/{request_id}")
            if answer.get("type") != "try_again":
                break
        if answer.get("error") is not None:
            raise EngineError(f"{request_id}: {answer['error']}")
        return answer

    async def train(self, work: TenantWork) -> dict[str, Any]:
        """Add the gradients of a batch; returns its metrics."""
        return await self.wait(await self.submit("batch", encode_work(work)))

    async def step(self, adam: AdamSettings | None = None) -> dict[str, Any]:
        """Make an optimizer step; returns its metrics."""
        return await self._request("step", StepBody(adam=adam))

    async def publish(self, version: int) -> dict[str, Any]:
        """Publish the current weights as this version, from which engines then sample."""
        return await self._request("publish", PublishBody(version=version))

    async def save(self, name: str, progress: dict[str, Any]) -> dict[str, Any]:
        """Save the state; returns its path. progress: kept beside it."""
        return await self._request("save", SaveBody(name=name, progress=progress))

    async def load(self, name: str, *, optimizer: bool = True) -> dict[str, Any]:
        """Load a saved state; returns its step and progress."""
        return await self._request("load", LoadBody(name=name, optimizer=optimizer))

    async def _request(self, kind: str, body: msgspec.Struct) -> dict[str, Any]:
        return await self.wait(await self.submit(kind, msgspec.json.encode(body)))

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        path = f"{RUNS}/{self.id}{api.GENERATE}"
        data = await self._bytes("POST", path, api.encode_generate(request))
        return decode_completions(request, data)

    async def end(self) -> None:
        await self._call("POST", f"{RUNS}/{self.id}/end")

    async def end_named(self, name: str) -> None:
        """End this user's run of this name, if there is one."""
        await self._call("POST", END_NAMED.format(run=name))

    async def forget(self, name: str) -> None:
        """Delete a saved state of this run."""
        path = f"/api/v1/training_runs/{self.id}/checkpoints/weights/{name}"
        await self._call("DELETE", path)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        return dict(msgspec.json.decode(await self._bytes(method, path, body) or b"{}"))

    async def _bytes(self, method: str, path: str, body: bytes | None = None) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        reason = ""
        for _ in range(_TRIES):
            try:
                async with self._session.request(method, self._url + path, data=body) as response:
                    data = await response.read()
                if response.status in (200, 201, 204):
                    return data
                reason = f"HTTP {response.status}: {api.error_message(data)}"
                if response.status not in (429, 500, 502, 503):
                    raise EngineError(f"{self._url}{path}: {reason}")
            except aiohttp.ClientError as error:
                reason = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_RETRY_S)
        raise EngineError(f"{self._url}{path}: {reason} (after {_TRIES} attempts)")


# -- before a run starts: plain requests, without an event loop --


def find_token(section: ServiceRunSection) -> str:
    """This user's token. Raises: ConfigError if the environment variable is not set."""
    if token := os.environ.get(section.token_var, "").strip():
        return token
    raise ConfigError(
        f"[service]: the environment variable {section.token_var} is not set; put your token of {section.url} into it "
        "(RUN/tokens.json of the service has it), or name another one as service.token_var"
    )


def check_run(section: ServiceRunSection, body: CheckRun) -> dict[str, Any]:
    """Ask whether the service takes this run; returns its answer.

    Raises: ConfigError with the service's reason and HTTP status; ConnectionError if no service answers there.
    """
    return _post(section, CHECK, msgspec.json.encode(body))


def end_run(section: ServiceRunSection, name: str) -> None:
    """End this user's run of this name, if there is one. Raises: as `check_run`."""
    _post(section, END_NAMED.format(run=name), b"{}")


def _post(section: ServiceRunSection, path: str, body: bytes) -> dict[str, Any]:
    request = urllib.request.Request(
        section.url.rstrip("/") + path,
        data=body,
        headers={"X-API-Key": find_token(section), "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with open_url(request, _CHECK_TIMEOUT_S) as response:
            return dict(msgspec.json.decode(response.read()))
    except urllib.error.HTTPError as error:
        text = api.error_message(error.read())
        raise ConfigError(f"service {section.url} does not take this run: {text} (HTTP {error.code})") from None
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConnectionError(f"no training service answers at {section.url}: {reason}") from None
