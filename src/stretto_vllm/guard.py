"""ASGI middleware in front of vLLM's routes: API key, list of served routes, checks of bodies.

vLLM 0.32 requires its key below /v1 and /inference only. Its development routes, some of which we need, let anyone
call any method of its workers. The guard requires the key on all but three routes, answers 404 on routes that are not
listed, and enforces the order of a weight update (../update_order.py). It checks bodies as the embedded engine does,
because vLLM detects a number that does not fit int64, or an invalid token id, only inside the engine, which then ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from stretto.inference.boundary import GENERATING, NO_KEY, OPEN_ROUTES, OpenBytes, check_origin, is_allowed
from stretto.inference.limits import check_queue
from stretto.inference.update_order import UpdateOrder
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal
from stretto_vllm.bodies import CheckedBody, EngineSizes, check

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SERVED_BELOW = ("/v1/", "/inference/v1/")
"""vLLM's public routes."""
SERVED = OPEN_ROUTES | {
    api.TOKENIZE, api.DETOKENIZE, api.METRICS, f"{api.METRICS}/", api.PAUSE, api.RESUME, api.IS_PAUSED,
    api.START_UPDATE, api.UPDATE_WEIGHTS, api.FINISH_UPDATE, api.WORLD_SIZE, api.RESET_PREFIX_CACHE, api.SLEEP,
    api.WAKE_UP, api.IS_SLEEPING, api.ABORT, api.ABORT_REQUESTS, api.ADMIT, "/version", "/load", "/ping",
}  # fmt: skip
"""Other routes that are served; vLLM's /collective_rpc, /server_info and others are not."""
COMMANDS = {api.START_UPDATE, api.UPDATE_WEIGHTS, api.FINISH_UPDATE, api.LOAD_ADAPTER, api.UNLOAD_ADAPTER}
"""Routes that occupy the workers until they end; vLLM answers 500 even if it refuses them."""


class _CallFailed(Exception):
    """vLLM has answered the call with an error."""


class Guard:
    """ASGI middleware around vLLM's app.

    max_waiting: requests that may be open in this process beyond those that the engine runs at a time.
    max_open_bytes: bytes of the bodies of open requests.
    """

    def __init__(
        self, app: App, *, key: str | None, max_waiting: int | None = None, max_open_bytes: int | None = None
    ) -> None:
        self._app, self._key, self._max_waiting = app, key, max_waiting
        self._sizes: EngineSizes | None = None
        self._order = UpdateOrder()
        self._open_bytes = OpenBytes(max_open_bytes)
        self._num_open = 0
        self._num_commands = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "only HTTP is served here"})
            return
        scope.setdefault("state", {}).update(num_commands=self._num_commands, update_order=self._order)
        try:
            with ExitStack() as open_request:
                body = await self._check_request(scope, receive, open_request)
                if body is not None:
                    receive = _replay(body.data, receive)
                if scope["path"] == api.PAUSE and (updates := getattr(scope["app"].state, "updates", None)):
                    await updates.until_loaded()
                open_request.enter_context(suppress(_CallFailed))
                open_request.enter_context(self._order.call(scope["path"] if scope["method"] == "POST" else ""))
                await self._forward(scope, receive, _Answer(scope, body, send))
        except Refusal as refusal:
            await _send_refusal(send, refusal)

    async def _forward(self, scope: Message, receive: Receive, answer: _Answer) -> None:
        """Let vLLM answer. Raises: _CallFailed if its status is not 200."""
        is_counted, is_command = scope["path"] in GENERATING, scope["path"] in COMMANDS
        self._num_open += is_counted
        self._num_commands += is_command
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # vLLM has sent no answer
            if not await answer.refuse(f"{type(error).__name__}: {error}"):
                raise
        finally:
            self._num_open -= is_counted
            self._num_commands -= is_command
        if answer.status != 200:
            raise _CallFailed

    async def _check_request(self, scope: Message, receive: Receive, open_request: ExitStack) -> CheckedBody | None:
        """Check a request and return its body, None if it has none. Raises: Refusal."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if not is_allowed(path, headers.get(b"authorization", b""), self._key):
            raise Refusal(NO_KEY, 401)
        names = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers.items()}
        check_origin(scope["method"], names, self._key)
        if path not in SERVED and not path.startswith(SERVED_BELOW):
            raise Refusal(f"{scope['method']} {path[:200]}: Not Found", 404)
        if scope["method"] != "POST":
            return None
        sizes = self._sizes = self._sizes or EngineSizes.of(scope["app"].state)
        if path in (api.SLEEP, api.WAKE_UP) and not sizes.can_sleep:
            raise Refusal(f"{path}: this engine was started without enable_sleep_mode", 404)
        if path in GENERATING and self._max_waiting is not None:
            check_queue(self._num_open - sizes.max_num_seqs, self._max_waiting)
        if path not in GENERATING:
            return check(path, await _read(receive, sizes.max_body_bytes(path)), sizes)
        hold = open_request.enter_context(self._open_bytes.request(int(headers.get(b"content-length") or 0)))
        data = await _read(receive, sizes.max_body_bytes(path))
        hold(len(data))
        return check(path, data, sizes)


async def _read(receive: Receive, limit: int) -> bytes:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal("the caller has disconnected", 499)
        data += message.get("body", b"")
        if len(data) > limit:
            raise Refusal(f"the body has more than {limit} bytes, the limit of this route", 413)
        if not message.get("more_body", False):
            return bytes(data)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body as one message, and then calls the given one."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return pending.pop() if pending else await receive()

    return receive_body


class _Answer:
    """vLLM's answer to one request; some of its internal errors become refusals.

    vLLM answers 500 even for refused commands and invalid grammars. While its engine is healthy, the sender gets a
    refusal instead.
    """

    def __init__(self, scope: Message, body: CheckedBody | None, send: Send) -> None:
        self._send, self._client = send, scope["app"].state.engine_client
        self._is_command = scope["path"] in COMMANDS
        self._has_grammar = body is not None and body.has_grammar
        self._has_begun = False
        self._is_withheld = False  # vLLM's 500, which a refusal will replace
        self._withheld = b""
        self.status = 0  # of vLLM's answer

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_withheld = self.status == 500 and self._is_request_fault()
        if not self._is_withheld:
            self._has_begun = True
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._withheld += message.get("body", b"")
            if not message.get("more_body", False):
                await self.refuse(api.error_message(self._withheld))

    async def refuse(self, reason: str) -> bool:
        """Answer with a refusal; False if the fault is the server's, or the answer has begun."""
        if self._has_begun or not self._is_request_fault():
            return False
        self._has_begun = True
        refusal = Refusal(reason, 409)
        if not self._is_command:
            refusal = Refusal(f"the grammar of the reply (structured output, tools) is invalid: {reason}")
        await _send_refusal(self._send, refusal)
        return True

    def _is_request_fault(self) -> bool:
        return (self._is_command or self._has_grammar) and not self._client.errored


async def _send_refusal(send: Send, refusal: Refusal) -> None:
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    status = 400 if refusal.status == 499 else refusal.status
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
