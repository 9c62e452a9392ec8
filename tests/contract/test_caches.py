"""Caches that move between engines: separate prefill and decode, and a store that engines share."""

from __future__ import annotations

import asyncio
import re
from importlib.util import find_spec
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from ports import free_port, free_ports_in_a_row
from servers import logprobs_of, needs_vllm, save, scratch, serve

from stretto.base.errors import EngineError
from stretto.models.hub import export_tensors
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

pytestmark = [pytest.mark.slow, needs_vllm]
KEY = "a-key-of-ours"
PROMPT = np.random.default_rng(0).integers(10, 110, 300).astype(np.int32)
needs_router = pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed")
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: `make vllm`")
needs_mooncake = pytest.mark.skipif(find_spec("mooncake") is None, reason="Mooncake is not installed: `make vllm`")


def ask(name: str, salt: str, session: str | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_tokens=8, seed=1, ignore_eos=True),
        cache_salt=salt,
        session_id=session,
    )


def assert_right(completion, model) -> None:
    expected = logprobs_of(model, np.concatenate([PROMPT, completion.token_ids]))
    np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=5e-5, rtol=0)


async def total(url: str, name: str) -> float:
    async with EngineClient([url], timeout_s=60, api_key=KEY) as client:
        return (await client.metrics()).get(name, 0.0)


async def until(url: str, name: str, least: float) -> None:
    """Wait for a counter that an engine updates late."""
    async with asyncio.timeout(60):
        while await total(url, name) < least:
            await asyncio.sleep(0.2)


async def until_stored(metrics_port: int, least: int) -> None:
    """Wait for blocks in Mooncake's store: the first engine stores what it has read when the request has ended."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
                [count] = re.findall(r"^master_key_count (\d+)", await answer.text(), re.MULTILINE)
            if int(count) >= least:
                return
            await asyncio.sleep(0.2)


@needs_router
@needs_nixl
def test_prompts_are_read_by_one_engine_and_replies_written_by_another(tmp_path):
    """Also under new weights, and with no cache of the old ones; the router has the engines' key."""
    router, prefill, decode, channel = free_port(), free_port(), free_port(), free_ports_in_a_row(2)
    words = ["--deployment.type", "disaggregated", "--deployment.is-local", "--device", "cpu"]
    words += ["--deployment.router-port", str(router), "--deployment.prefill-port", str(prefill)]
    words += ["--deployment.decode-port", str(decode), "--deployment.side-channel-port", str(channel)]
    admin = [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)

    async def check() -> None:
        options = {"timeout_s": 120, "max_retries": 30, "splits_samples": True}
        async with EngineClient([f"http://127.0.0.1:{router}"], admin, KEY, **options) as client:
            await client.wait_ready(300)
            for version in (0, 1):
                if version:
                    await client.update_weights(publisher.publish(1, export_tensors(scratch(1))))
                [completion] = await client.generate(ask(f"v{version}", str(version), session="a"))
                assert_right(completion, scratch(version))
            await until(admin[1], "vllm:external_prefix_cache_hits_total", 2 * 256)
            await until(admin[0], "vllm:generation_tokens_total", 2)
            assert await total(admin[0], "vllm:generation_tokens_total") == 2
            group = msgspec.structs.replace(ask("group", "group"), n=4)
            for completion in await client.generate(group):
                assert_right(completion, scratch(1))
            await check_that_an_update_keeps_a_cache(client, publisher, *admin)
        async with EngineClient([f"http://127.0.0.1:{router}"]) as stranger:
            with pytest.raises(EngineError, match="HTTP 401"):
                await stranger.generate(ask("stranger", "0"))

    model, key = save(scratch(0), tmp_path / "model"), {"VLLM_API_KEY": KEY}
    with serve("vllm", model, tmp_path / "log", *words, env=key):
        asyncio.run(check())


async def check_that_an_update_keeps_a_cache(
    client: EngineClient, publisher: FilesystemPublisher, prefill: str, decode: str
) -> None:
    """A cache that no decode engine has fetched yet holds up no update, and can be fetched after it.

    A lease is 30 s. The update has the same weights as before, to compare with.
    """
    body = {"token_ids": PROMPT.tolist(), "cache_salt": "left", "kv_transfer_params": {"do_remote_decode": True}}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:

        async def post(url: str, **more: Any) -> dict[str, Any]:
            async with http.post(url + api.GENERATE, json=body | more) as answer:
                return await answer.json()

        read = await post(prefill, request_id="left", sampling_params={"max_tokens": 1})
        async with asyncio.timeout(20):
            await client.update_weights(publisher.publish(2, export_tensors(scratch(1))))
        before = await total(decode, "vllm:external_prefix_cache_hits_total")
        sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        place = read["kv_transfer_params"]
        fetched = await post(decode, request_id="f", sampling_params=sampling, kv_transfer_params=place)
        await until(decode, "vllm:external_prefix_cache_hits_total", before + 256)
        alone = await post(decode, request_id="a", sampling_params=sampling, kv_transfer_params=None, cache_salt="a")
        assert fetched["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        assert await total(prefill, "vllm:nixl_num_kv_expired_reqs_total") == 0


@needs_mooncake
def test_a_second_engine_reads_from_the_store_what_the_first_has_read(tmp_path):
    ports = {key: free_port() for key in ("master_port", "metadata_port", "metrics_port", "client_port")}
    backend = free_ports_in_a_row(2)
    words = ["--deployment.num-replicas", "2", "--router", "None", "--device", "cpu"]
    words += ["--deployment.backend-port", str(backend)]
    words += ["--kv-cache-offload.type", "mooncake", "--kv-cache-offload.protocol", "tcp"]
    words += ["--kv-cache-offload.cpu.num-bytes", str(64 << 20)]
    for key, port in ports.items():
        words += [f"--kv-cache-offload.{key.replace('_', '-')}", str(port)]
    first, second = (f"http://127.0.0.1:{backend + i}" for i in range(2))

    async def check() -> None:
        async with EngineClient([first], [first, second], timeout_s=120) as client:
            await client.wait_ready(300)
            [completion] = await client.generate(ask("first", "salt"))
            assert_right(completion, scratch(0))
        async with EngineClient([second], timeout_s=120) as client:
            await until_stored(ports["metrics_port"], len(PROMPT) // 32)
            [again] = await client.generate(ask("second", "salt"))
            assert_right(again, scratch(0))
            await until(second, "vllm:external_prefix_cache_hits_total", 256)
            [other] = await client.generate(ask("third", "another version"))
            assert other.cached_tokens == 0

    with serve("vllm", save(scratch(0), tmp_path / "model"), tmp_path / "log", *words):
        asyncio.run(check())
