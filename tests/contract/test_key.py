"""On both engines all but three routes need the key; and routes that no engine serves."""

from __future__ import annotations

import aiohttp
import numpy as np
import pytest
from servers import needs_vllm, save, scratch, serve

from stretto.base.errors import EngineError
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient

KEY = "a-key-of-ours"
OPEN = ("/health", "/liveness", "/admitted")
GUARDED = (
    *(("GET", path) for path in (api.MODELS, api.METRICS, "/metrics/", api.IS_PAUSED, api.WORLD_SIZE, "/version")),
    *(("POST", path) for path in (api.GENERATE, api.COMPLETIONS, api.CHAT_COMPLETIONS, api.TOKENIZE, api.DETOKENIZE)),
    *(("POST", path) for path in (api.PAUSE, api.RESUME, api.START_UPDATE, api.UPDATE_WEIGHTS, api.FINISH_UPDATE)),
    *(("POST", path) for path in (api.LOAD_ADAPTER, api.UNLOAD_ADAPTER, api.RESET_PREFIX_CACHE, api.ABORT)),
    ("POST", "/inference/v1/abort_requests"), ("OPTIONS", api.PAUSE), ("PUT", api.PAUSE),
    ("POST", api.SLEEP), ("POST", api.WAKE_UP), ("GET", api.IS_SLEEPING),
)  # fmt: skip
CLOSED = (
    ("POST", "/collective_rpc"), ("GET", "/server_info"), ("POST", "/weight_checker"), ("POST", "/start_profile"),
    ("POST", "/scale_elastic_ep"), ("POST", "/reset_mm_cache"),
    ("POST", "/invocations"), ("POST", "/update_weight_version"), ("POST", "/shutdown_weight_transfer_engine"),
    ("GET", "/openapi.json"), ("GET", "/docs"), ("POST", "//collective_rpc"), ("POST", "/v1/../collective_rpc"),
    ("POST", "/collective_rpc/"), ("POST", "/%63ollective_rpc"),
)  # fmt: skip


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=needs_vllm)])
def guarded(request, tmp_path_factory):
    """An engine whose key is set in the environment."""
    directory = tmp_path_factory.mktemp(request.param)
    with serve(request.param, save(scratch(0), directory / "model"), directory / "log", env={"VLLM_API_KEY": KEY}) as (
        url,
        _,
    ):
        yield url


@pytest.fixture
async def client(guarded):
    async with EngineClient([guarded], api_key=KEY) as client:
        await client.wait_ready(240)
        yield client


async def ask(client: EngineClient) -> int:
    request = GenerateRequest(
        request_id="r", prompt_ids=np.array([20, 21], np.int32), sampling=SamplingParams(max_tokens=3, ignore_eos=True)
    )
    return len((await client.generate(request))[0].token_ids)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}])
async def test_without_the_key_nothing_but_three_routes_answers(guarded, client, headers):
    async with aiohttp.ClientSession(headers=headers) as http:
        for path in OPEN:
            async with http.get(guarded + path) as answer:
                assert answer.status == 200, path
        for method, path in (*GUARDED, *CLOSED):
            async with http.request(method, guarded + path, json={}) as answer:
                assert answer.status == 401, (method, path, await answer.text())
    assert await ask(client) == 3


async def test_what_runs_code_in_workers_is_off_with_the_key_too(guarded, client):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
        for method, path in CLOSED:
            async with http.request(method, guarded + path, json={"method": "stretto_is_alive"}) as answer:
                assert answer.status in (404, 405), (method, path, await answer.text())


async def test_a_client_without_the_key_gets_a_clear_error(guarded, client):
    async with EngineClient([guarded]) as stranger:
        with pytest.raises(EngineError, match="401"):
            await ask(stranger)
    assert await ask(client) == 3 and await client.metrics()
