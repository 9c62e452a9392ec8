"""What comes over HTTP: wrong bodies, headers and sizes are answered with a message, and other requests do not wait."""

import asyncio
import gzip
import json
import logging
import time

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from engine_runs import audit
from http_site import KEY, MESSAGES, build_directory, open_site
from ports import free_port

from stretto.base.aio import LATE_SHARE
from stretto.base.errors import EngineError
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto.transports.engine.gate import RequestGate
from stretto.transports.engine.http import Connections, Lost, backoff_s
from stretto.vime.requests import give_key, send

ROUTES = {
    api.GENERATE: {"token_ids": [20, 21], "sampling_params": {"max_tokens": 2}},
    api.COMPLETIONS: {"prompt": "ab", "max_tokens": 2},
    api.CHAT_COMPLETIONS: {"messages": MESSAGES, "max_tokens": 2},
    api.TOKENIZE: {"prompt": "ab"},
    api.DETOKENIZE: {"tokens": [20, 21]},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def site(directory):
    async with open_site(directory) as site:
        yield site


@pytest.fixture
def no_traceback(caplog):
    """Nothing that callers do is an error of ours."""
    caplog.set_level(logging.INFO)
    yield
    assert [r.getMessage() for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("depth", [1200, 200_000])
async def test_json_nested_deeply_is_refused(site, no_traceback, route, depth):
    status, answer = await site.post(route, b'{"messages":' + b"[" * depth + b"]" * depth + b"}")
    assert status == 400, answer


@pytest.mark.parametrize("route", ROUTES)
async def test_a_plain_body_that_claims_to_be_packed_is_refused(site, no_traceback, route):
    body = json.dumps(ROUTES[route]).encode()
    headers = {"Content-Encoding": "gzip"}
    status, answer = await site.post(route, body, headers=headers)
    assert status == 400 and "cannot be read" in answer["error"]["message"]
    assert (await site.post(route, gzip.compress(body), headers=headers))[0] == 200


@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_that_is_too_large_is_refused_before_it_has_come(site, no_traceback, route):
    status, answer = await site.post(route, b'{"prompt":"' + b"a" * (8 << 20) + b'"}')
    assert status == 413 and "more than" in answer["error"]["message"]


@pytest.mark.heavy
@pytest.mark.parametrize("route", ROUTES)
async def test_a_small_body_that_unpacks_to_a_large_one_is_refused(site, no_traceback, route):
    bomb = gzip.compress(b'{"prompt":"' + b"a" * (40 << 20) + b'"}')
    status, answer = await site.post(route, bomb, headers={"Content-Encoding": "gzip"})
    assert status in (400, 413), answer


@pytest.mark.parametrize(
    "tool_calls",
    [1, "x", {}, [1], [None], [{}], [{"function": 1}], [{"function": {"name": 1}}],
     [{"function": {"name": "f", "arguments": 3}}]],
)  # fmt: skip
async def test_tool_calls_of_wrong_types_are_refused(site, no_traceback, tool_calls):
    messages = [{"role": "assistant", "content": "a", "tool_calls": tool_calls}, *MESSAGES]
    status, answer = await site.post(api.CHAT_COMPLETIONS, {"messages": messages, "max_tokens": 2})
    assert status == 400 and answer["error"]["message"].startswith("messages[0]: ")


@pytest.mark.parametrize("content", [3, {}, True, [1], [{"type": "image"}], [{"type": "text", "text": 4}]])
async def test_content_of_wrong_types_is_never_an_error_of_ours(site, no_traceback, content):
    status, _ = await site.post(
        api.CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    )
    assert status in (200, 400)


@pytest.mark.parametrize(
    "body, message",
    [
        ({"token_ids": "a"}, "token_ids: expected `array`, got `str`"),
        ({"token_ids": [1], "sampling_params": {"top_k": "x"}}, "sampling_params.top_k: expected `int | null`"),
        ({"token_ids": [1], "sampling_params": {"top": 1}}, "sampling_params: object contains unknown field `top`"),
        ([], "the body: expected `object`, got `array`"),
        ({"token_ids": [1], "sampling_params": {"temperature": 1e-39}}, "temperature: 1e-39 is not allowed"),
    ],
)  # fmt: skip
async def test_a_refusal_says_where_and_what(site, body, message):
    status, answer = await site.post(api.GENERATE, body)
    assert status == 400 and answer["error"]["message"].startswith(message)


async def raw(site, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """A request byte for byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    writer.write(head + b"Host: x\r\nConnection: close\r\n" + length + b"\r\n" + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ")[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "authorization",
    [b"Bearer \xff", b"Bearer \xc3\xa9", b"Bearer", b"", b"Basic c2VjcmV0", b"Bearer secre", b"Bearer secrett"],
)
async def test_a_wrong_key_is_401_whatever_its_bytes(site, no_traceback, authorization):
    head = b"GET /v1/models HTTP/1.1\r\nAuthorization: " + authorization + b"\r\n"
    status, body = await raw(site, head)
    assert status == 401 and b"API key" in body


async def test_the_key_guards_every_route_but_three(site):
    async with aiohttp.ClientSession() as session:
        for resource in site.server.app().router.resources():
            for method in ("GET", "POST"):
                async with session.request(method, site.url + resource.canonical) as answer:
                    is_open = resource.canonical in ("/health", "/liveness", "/admitted")
                    assert (answer.status == 401) == (not is_open), resource.canonical
        async with session.get(site.url + "/no/such/route") as answer:
            assert answer.status == 401
    assert (await site.get("/no/such/route"))[0] == 404
    assert (await site.get(api.GENERATE))[0] == 405


async def test_an_id_that_is_no_text_does_not_reach_an_answer(site):
    site.server.openai = None  # a fault of ours
    head = b"POST /inference/v1/generate HTTP/1.1\r\nAuthorization: Bearer secret\r\nX-Request-Id: \xff\xfe\r\n"
    status, body = await raw(site, head, b'{"token_ids":[20]}')
    assert status == 500 and json.loads(body)["error"]["message"].startswith("internal error in request ")


@pytest.mark.heavy
async def test_refusals_inside_completions_keep_their_status(site, no_traceback):
    slow = {"prompt": [20], "max_tokens": 400, "ignore_eos": True, "request_id": "same"}
    first = asyncio.create_task(site.post(api.COMPLETIONS, slow))
    while not site.engine.core.requests:
        await asyncio.sleep(0.001)
    for is_streamed in (False, True):
        status, answer = await site.post(api.COMPLETIONS, slow | {"stream": is_streamed})
        assert status == 409 and "is in use" in answer["error"]["message"]
        status, answer = await site.post(
            api.COMPLETIONS, {"prompt": [[20]] * 5000, "max_tokens": 2, "stream": is_streamed}
        )
        assert status == 429 and "max_waiting_requests" in answer["error"]["message"]
    assert (await first)[0] == 200
    async with asyncio.timeout(60):
        while site.engine._tickets:
            await asyncio.sleep(0.01)
    assert audit(site.engine.core) == []


@pytest.mark.parametrize("route", [api.COMPLETIONS, api.TOKENIZE, api.CHAT_COMPLETIONS])
async def test_a_text_that_is_surely_too_long_is_not_cut_into_tokens(site, no_traceback, route):
    text = "a" * (3 << 20)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in route else {"prompt": text}

    async def longest_wait() -> float:
        longest = 0.0
        while not done.is_set():
            started = time.perf_counter()
            assert (await site.get(api.HEALTH))[0] == 200
            longest = max(longest, time.perf_counter() - started)
        return longest

    done = asyncio.Event()
    waiting = asyncio.create_task(longest_wait())
    status, answer = await site.post(route, body)
    done.set()
    assert status == 400 and "max_model_len" in answer["error"]["message"]
    assert await waiting < 20  # cut into tokens, the text would take minutes


@pytest.mark.heavy
async def test_health_answers_while_a_text_is_cut_into_tokens(site, no_traceback, monkeypatch):
    site.engine.core.max_model_len = 100_000  # so that it is not refused by its size
    task = asyncio.create_task(site.post(api.TOKENIZE, {"prompt": "ab d" * 100_000}))
    answers = 0
    while not task.done():
        assert (await site.get(api.HEALTH))[0] == 200
        answers += 1
    status, answer = await task
    assert status == 200 and answer["count"] == 400_000
    assert answers > 5


async def test_streams_that_are_closed_leave_nothing_and_log_nothing(site, no_traceback):
    async def read_a_little(i: int) -> None:
        body = {"prompt": "ab", "max_tokens": 400, "stream": True, "ignore_eos": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        data = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        await reader.read(100 if i % 2 else 1)
        if i % 3:
            writer.transport.abort()
        writer.close()

    for _ in range(5):
        await asyncio.gather(*(read_a_little(i) for i in range(8)))
    async with asyncio.timeout(20):
        while site.engine._tickets or site.engine.core.requests:
            await asyncio.sleep(0.01)
    assert audit(site.engine.core) == [] and not site.engine._streams
    assert (await site.post(api.COMPLETIONS, {"prompt": "ab", "max_tokens": 2}, headers=KEY))[0] == 200


def small(i: int, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    return GenerateRequest(request_id=f"r{i}", prompt_ids=np.array([20], np.int32), n=n, sampling=sampling)


@pytest.mark.heavy
async def test_a_full_engine_makes_the_client_wait_and_costs_no_attempt(site, no_traceback):
    async with EngineClient([site.url], api_key="secret", max_retries=0) as client:
        await client._all("POST", f"{api.PAUSE}?mode=keep")
        tasks = [asyncio.create_task(client.generate(small(i))) for i in range(400)]
        while site.engine.num_waiting < 8 or client._dispatch._gates[site.url].limit == float("inf"):
            await asyncio.sleep(0.001)
        await client._all("POST", api.RESUME)
        assert all(len(one[0].token_ids) == 2 for one in await asyncio.gather(*tasks))


@pytest.mark.heavy
async def test_an_engine_that_is_full_for_ever_is_given_up():
    async def full(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too many"}}, status=429)

    app = web.Application()
    app.router.add_post("/{path:.*}", full)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient([f"http://127.0.0.1:{port}"], recovery_timeout_s=0.5) as client, asyncio.timeout(60):
            ended = await asyncio.gather(*(client.generate(small(i)) for i in range(3)), return_exceptions=True)
    finally:
        await runner.cleanup()
    assert all(
        isinstance(error, EngineError) and "429: too many; it has none of our" in str(error) for error in ended
    ), ended


async def test_waiting_at_a_full_engine_takes_no_time_of_a_request(site):
    dispatch = EngineClient([site.url], api_key="secret")._dispatch
    with pytest.raises(TimeoutError), dispatch._deadlines.after(0.05) as limit:
        await dispatch._without_limit(limit, asyncio.sleep(0.2))
        assert not limit.is_over and limit.deadline is not None
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0.2)
        assert limit.is_over
        raise asyncio.CancelledError


async def test_however_often_a_request_is_rejected_its_time_stays_the_same(site):
    dispatch, loop = EngineClient([site.url], api_key="secret")._dispatch, asyncio.get_running_loop()
    with dispatch._deadlines.after(600.0) as limit:
        for _ in range(1000):
            await dispatch._without_limit(limit, asyncio.sleep(0))
        assert limit.deadline.when - loop.time() <= 600 * (1 + LATE_SHARE)


async def test_log_probabilities_that_are_not_finite_are_an_error(site):
    with torch.no_grad():
        for parameter in site.engine.core.model.parameters():
            parameter.fill_(float("nan"))
    async with EngineClient([site.url], api_key="secret") as client:
        with pytest.raises(EngineError, match=r"version 0 .*not finite"):
            await client.generate(small(0))


@pytest.mark.heavy
async def test_a_full_engine_does_not_fail_a_canary(site, no_traceback):
    async with EngineClient([site.url], api_key="secret", max_retries=0) as client:
        await client._all("POST", f"{api.PAUSE}?mode=keep")
        tasks = [asyncio.create_task(client.generate(small(i))) for i in range(20)]
        while site.engine.num_waiting < 8:
            await asyncio.sleep(0.001)
        scores = asyncio.create_task(client.score_canary(np.array([20, 21], np.int32), "canary"))
        await asyncio.sleep(0.3)
        await client._all("POST", api.RESUME)
        assert len((await scores)[site.url].prompt) == 2
        await asyncio.gather(*tasks)


async def test_an_engine_that_dies_before_it_scores_a_canary_is_left_out(site, no_traceback):
    dead = f"http://127.0.0.1:{free_port()}"
    async with EngineClient([site.url], [site.url, dead], "secret", max_retries=0) as client:
        scores = await client.score_canary(np.array([20, 21], np.int32), "canary")
        assert list(scores) == [site.url] == client.fleet.ready()
    async with EngineClient([dead], api_key="secret", max_retries=0) as client:
        with pytest.raises(EngineError, match=dead):
            await client.score_canary(np.array([20, 21], np.int32), "canary")


async def test_a_gate_keeps_the_order_and_grows_by_one_a_round():
    gate, order = RequestGate(), []

    async def one(i: int) -> None:
        await gate.enter()
        order.append(i)

    await asyncio.gather(*(one(i) for i in range(4)))
    gate.leave(was_full=True)
    assert gate.limit == 3 and gate.num_running == 3
    waiting = [asyncio.create_task(one(i)) for i in range(4, 9)]
    await asyncio.sleep(0)
    assert gate.num_running == 3
    waiting.pop(0).cancel()
    for _ in range(3):
        gate.leave(was_served=True)
    await asyncio.gather(*waiting[:3])
    assert order == [0, 1, 2, 3, 5, 6, 7] and gate.num_running == 3
    gate.leave()
    await waiting[3]
    assert 3.9 < gate.limit < 4


async def test_a_request_to_a_frozen_model_carries_its_key_and_one_to_another_server_does_not(site, monkeypatch):
    monkeypatch.setattr("stretto.vime.requests._model_keys", {})
    body = {"token_ids": [20], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    give_key(["http://127.0.0.1:9/v1"], "secret")
    with pytest.raises(EngineError, match="401"):
        await send(site.url + api.GENERATE, body)
    give_key([site.url + "/v1"], "secret")
    answer = await send(site.url + api.GENERATE, body)
    assert len(answer["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize("salt", ["g0.1/0/large", "a" * 200, "user@host", "back\\slash", "nul\0"])
def test_a_salt_that_vllm_refuses_is_sent_as_its_hash(salt: str) -> None:
    prompt = np.arange(3, dtype=np.int32)
    sent = {
        text: json.loads(api.encode_generate(GenerateRequest(request_id="a", prompt_ids=prompt, cache_salt=text)))
        for text in (salt, salt + "2", "plain")
    }
    salts = {text: body["cache_salt"] for text, body in sent.items()}
    assert salts["plain"] == "plain" and len(set(salts.values())) == 3
    assert all(len(each) <= 128 and not set(each) & set("@/\\\0") for each in salts.values())


async def test_an_engine_that_is_not_there_is_told_in_plain_words():
    connections = Connections({}, has_router=False)
    try:
        for host, why in ((f"127.0.0.1:{free_port()}", "connection refused$"), ("no-such-host.invalid:1", r"\w+")):
            with pytest.raises(Lost, match=rf"^http://{host}/health: cannot connect: {why}") as caught:
                await connections.request("GET", f"http://{host}/health")
            assert "Error" not in str(caught.value) and "[" not in str(caught.value)
    finally:
        await connections.close()


def test_waits_between_attempts_double_up_to_a_bound_however_many_there_are():
    assert [backoff_s(attempt) for attempt in (0, 1, 5, 6, 2000)] == [0.1, 0.2, 3.2, 5.0, 5.0]
