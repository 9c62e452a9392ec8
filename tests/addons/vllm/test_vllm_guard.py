"""The guard in front of vLLM's routes, over an app with given answers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.transports.engine import api
from stretto_vllm.bodies import EngineSizes
from stretto_vllm.guard import Guard

KEY = "k"


class App:
    """An app with an engine; records the bodies that reach it."""

    def __init__(self, status: int = 200, error: Exception | None = None) -> None:
        self.bodies: list[bytes] = []
        self.state = SimpleNamespace(engine_client=SimpleNamespace(errored=False))
        self._status, self._error = status, error

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        self.bodies.append(message.get("body", b""))
        if self._error is not None:
            raise self._error
        body = json.dumps({"error": {"message": "no"}}).encode()
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def ask(
    app: App,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    key: str | None = KEY,
    can_sleep: bool = False,
    **settings: Any,
) -> int:
    """The status that the guard answers with."""
    guard = Guard(app, key=KEY, **settings)
    guard._sizes = EngineSizes(vocab_size=100, max_model_len=64, max_num_seqs=4, token_bytes=8, can_sleep=can_sleep)
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": app}
    data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await guard(scope, receive, send)
    return sent[0]["status"]


PLAIN = {"token_ids": [5], "sampling_params": {"max_tokens": 2}}


@pytest.mark.parametrize("path", [api.PAUSE, api.METRICS, "/collective_rpc", "/v1/anything", "/"])
async def test_nothing_passes_without_the_key(path):
    app = App()
    for key in (None, "x", "kk"):
        assert await ask(app, path, key=key) == 401
    assert app.bodies == []


@pytest.mark.parametrize("path", ["/collective_rpc", "/sleep", "/server_info", "/pause/", "//pause", "/v1x"])
async def test_what_is_not_on_the_list_is_not_there(path):
    app = App()
    assert await ask(app, path) == 404 and app.bodies == []


async def test_an_engine_that_cannot_sleep_is_not_told_to():
    for path in (api.SLEEP, api.WAKE_UP):
        assert await ask(app := App(), path) == 404 and app.bodies == []
        assert await ask(app, path, can_sleep=True) == 200 and len(app.bodies) == 1


async def test_a_body_that_passes_arrives_as_it_was():
    app = App()
    assert await ask(app, api.GENERATE, PLAIN) == 200
    assert app.bodies == [json.dumps(PLAIN).encode()]


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[" * 5000, {}, {"token_ids": [5]}, PLAIN | {"token_ids": [100]}, PLAIN | {"token_ids": [-1]},
        PLAIN | {"token_ids": [2**63]}, PLAIN | {"token_ids": []}, PLAIN | {"token_ids": [5] * 64}, PLAIN | {"x": 1},
        *(PLAIN | {"sampling_params": params} for params in (
            {"top_k": 2**63}, {"seed": 2**64}, {"n": 5}, {"n": 0}, {"temperature": 1e-39}, {"stop_token_ids": [100]},
            {"stop_token_ids": [1] * 257}, {"stop": ["a"] * 65}, {"stop": ["a" * 1025]}, {"logprobs": 2**40},
            {"min_tokens": 2**63}, {"logit_bias": {"100": 1}}, {"bad_words": [1]}, {"presence_penalty": "x"},
            {"skip_clone": True}, {"extra_args": {"a": 1}},
        )),
    ],
)  # fmt: skip
async def test_a_body_that_would_reach_too_far_is_refused(body):
    app = App()
    assert await ask(app, api.GENERATE, body) == 400 and app.bodies == []


async def test_a_body_that_is_too_large_is_refused():
    assert await ask(App(), api.GENERATE, b" " * (5 << 20)) == 413
    assert await ask(App(), api.TOKENIZE, {"prompt": "a" * 600}) == 400


async def test_a_command_that_vllm_fails_at_is_refused_while_its_engine_goes_on():
    body = {"weight_version": "3"}
    assert await ask(App(status=500), api.FINISH_UPDATE, body) == 409
    assert await ask(App(error=RuntimeError("no")), api.FINISH_UPDATE, body) == 409
    assert await ask(App(status=500), api.GENERATE, PLAIN) == 500
    broken = App(error=RuntimeError("no"))
    broken.state.engine_client.errored = True
    with pytest.raises(RuntimeError):
        await ask(broken, api.FINISH_UPDATE, body)


async def test_calls_of_an_update_out_of_order_do_not_reach_vllm():
    app = App()
    assert await ask(app, api.START_UPDATE) == 409
    assert app.bodies == []


async def test_bytes_beyond_those_that_may_be_open_are_429_until_others_end():
    """A request counts from the head of its body until its answer has ended."""
    entered, answered, app = asyncio.Event(), asyncio.Event(), App()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        entered.set()
        await answered.wait()
        await app(scope, receive, send)

    guard = Guard(slow, key=None, max_open_bytes=len(json.dumps(PLAIN)) + 1)
    guard._sizes = EngineSizes(vocab_size=100, max_model_len=64, max_num_seqs=4, token_bytes=8)
    data = json.dumps(PLAIN).encode()

    async def call(headers: list[tuple[bytes, bytes]]) -> int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await guard(
            {
                "type": "http",
                "method": "POST",
                "path": api.GENERATE,
                "headers": [(b"host", b"127.0.0.1"), *headers],
                "app": app,
            },
            receive,
            send,
        )
        return sent[0]["status"]

    first = asyncio.ensure_future(call([]))
    await asyncio.wait_for(entered.wait(), 5)
    assert await call([]) == 429
    assert await call([(b"content-length", str(len(data)).encode())]) == 429
    answered.set()
    assert await first == 200 and await call([]) == 200 and len(app.bodies) == 2


async def test_more_requests_than_may_wait_are_429():
    assert await ask(App(), api.GENERATE, PLAIN, max_waiting=1) == 200
    guard_full = Guard(app := App(), key=None, max_waiting=0)
    guard_full._sizes = EngineSizes(vocab_size=100, max_model_len=64, max_num_seqs=0, token_bytes=8)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(PLAIN).encode()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": api.GENERATE, "headers": [(b"host", b"127.0.0.1")], "app": app}
    await guard_full(scope, receive, send)
    assert sent[0]["status"] == 429 and app.bodies == []
