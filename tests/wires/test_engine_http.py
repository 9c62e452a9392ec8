"""The engine in a process of its own: started by the verb, used, updated, stopped, killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from ports import free_port
from processes import forked

from stretto.base.errors import EngineError
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models.attention import PackedLayout
from stretto.models.hub import export_tensors, random_model, save_hf
from stretto.orchestrator.run.ship import engine_loads
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.weight_manifest import Canary
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.shm import ShmPublisher
from stretto.transports.weights.sums import GroupSums


def scratch(seed: int):
    return random_model(ScratchSection(seed=seed, max_position_embeddings=1024), 112, eos_token_id=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    path = build_letters_tokenizer(tmp_path_factory.mktemp("model"))
    assert load_tokenizer(path).vocab_size == 112
    save_hf(scratch(0), path, path)
    return path


@contextlib.contextmanager
def serve(model_dir: Path, port: int, log: Path, *flags: str) -> Iterator[subprocess.Popen]:
    """`stretto inference` as a child process."""
    words = [
        "inference",
        "--model",
        str(model_dir),
        "--server.port",
        str(port),
        "--output-dir",
        str(log.parent),
        *flags,
    ]
    with log.open("wb") as out:
        child = forked.Popen([sys.executable, "-m", "stretto", *words], stdout=out, stderr=out)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def ask(name: str, **sampling) -> GenerateRequest:
    sampling = {"max_tokens": 8, "seed": 1, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=name, prompt_ids=np.arange(20, 50, dtype=np.int32), n=2, sampling=SamplingParams(**sampling)
    )


def logprobs_of(model, request: GenerateRequest, completion) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        logprobs = torch.log_softmax(hidden @ model.output_weight.T, -1)
    start = len(request.prompt_ids)
    return logprobs[start - 1 : -1].gather(1, ids[start:, None]).squeeze(1).numpy()


async def test_an_engine_process_from_start_to_stop(model_dir, tmp_path):
    port = free_port()
    publisher = ShmPublisher("test-engine-http")
    try:
        with serve(model_dir, port, tmp_path / "log") as child:
            async with EngineClient([f"http://127.0.0.1:{port}/v1"], timeout_s=60) as client:
                await client.wait_ready(240)

                before = await client.generate(ask("before"))
                async with EngineClient([f"http://127.0.0.1:{port}"], splits_samples=True) as splitting:
                    for alone, together in zip(await splitting.generate(ask("alone")), before, strict=True):
                        assert alone.token_ids.tolist() == together.token_ids.tolist()
                for completion in before:
                    expected = logprobs_of(scratch(0), ask("before"), completion)
                    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)

                for version in range(1, 6):  # on a busy machine replies may end before the update comes
                    begun = (await client.metrics())["vllm:generation_tokens_total"]
                    running = asyncio.create_task(client.generate(ask(f"running {version}", max_tokens=400)))
                    while (await client.metrics())["vllm:generation_tokens_total"] < begun + 40:
                        await asyncio.sleep(0)
                    await client.update_weights(publisher.publish(version, export_tensors(scratch(version))))
                    done = await running
                    assert all(len(completion.token_ids) == 400 for completion in done)
                    spans = [[span.version for span in completion.versions] for completion in done]
                    if spans == 2 * [[version - 1, version]]:
                        break
                    assert spans == 2 * [[version - 1]], "the update came while they ran"
                assert len(spans[0]) == 2, "no update came while replies were written"
                assert [load[3] for load in (await engine_loads(client))[0].values()] == [version]

                after = await client.generate(ask("after"))
                for completion in after:
                    expected = logprobs_of(scratch(version), ask("after"), completion)
                    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
                    assert completion.cached_tokens == 0

                child.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(child.wait, 60) == 0
    finally:
        publisher.close()


async def test_a_killed_engine_is_an_engine_error_for_everybody_who_waits(model_dir, tmp_path):
    port = free_port()
    with serve(model_dir, port, tmp_path / "log", "--api-key", "k") as child:
        async with EngineClient([f"http://127.0.0.1:{port}"], api_key="k", timeout_s=60, max_retries=1) as client:
            await client.wait_ready(240)
            async with EngineClient([f"http://127.0.0.1:{port}"], timeout_s=60) as outsider:
                with pytest.raises(EngineError, match="API key"):
                    await outsider.generate(ask("outsider"))
            tasks = [asyncio.create_task(client.generate(ask(f"r{i}", max_tokens=400))) for i in range(3)]
            while (await client.metrics())["vllm:num_requests_running"] == 0:
                await asyncio.sleep(0)
            os.kill(child.pid, signal.SIGKILL)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)


async def test_a_failed_engine_says_so_and_ends_its_process(model_dir, tmp_path):
    port = free_port()
    breaking = """
import sys
from stretto.config.root import InferenceConfig
from stretto.inference import server
from stretto.inference.embedded.core import EngineCore
def step(self):
    raise RuntimeError("the step broke")
EngineCore.step = step
sys.exit(server.main(InferenceConfig(model=sys.argv[1], server={"port": int(sys.argv[2])})))
"""
    log = tmp_path / "log"
    with log.open("wb") as out:
        child = forked.Popen([sys.executable, "-c", breaking, str(model_dir), str(port)], stdout=out, stderr=out)
    try:
        async with EngineClient([f"http://127.0.0.1:{port}"], timeout_s=30, max_retries=0) as client:
            await client.wait_ready(240)
            with pytest.raises(EngineError):
                await client.generate(ask("r"))
        assert await asyncio.to_thread(child.wait, 60) == 1
        assert "RuntimeError: the step broke" in log.read_text()
    finally:
        child.kill()
        child.wait()


async def test_a_port_in_use_is_a_message_not_a_traceback(model_dir, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serve(model_dir, port, tmp_path / "log") as child:
            assert await asyncio.to_thread(child.wait, 60) != 0
    text = (tmp_path / "log").read_text()
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert "Traceback" not in text


async def test_health_answers_while_a_request_is_long(model_dir, tmp_path):
    port = free_port()
    with serve(model_dir, port, tmp_path / "log"):
        async with EngineClient([f"http://127.0.0.1:{port}"], timeout_s=60) as client, aiohttp.ClientSession() as http:
            await client.wait_ready(240)
            task = asyncio.create_task(client.generate(ask("long", max_tokens=150)))
            answers = 0
            while not task.done():
                async with http.get(f"http://127.0.0.1:{port}{api.HEALTH}") as response:
                    assert response.status == 200
                answers += 1
            assert answers > 5
            await task


async def test_a_request_carries_its_rollout_in_the_headers_that_the_config_names():
    seen = []

    async def refuse(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        return web.json_response({"error": {"message": "enough"}}, status=400)

    app = web.Application()
    app.router.add_post(api.GENERATE, refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        for names in (("X-Session-ID",), ("X-Session-ID", "X-User-ID"), ()):
            async with EngineClient([url], session_headers=names) as client:
                request = GenerateRequest(
                    request_id="r",
                    prompt_ids=np.arange(3, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=1),
                    session_id="rollout-7",
                )
                with pytest.raises(EngineError, match="enough"):
                    await client.generate(request)
            assert {name for name, value in seen[-1].items() if value == "rollout-7"} == set(names)


async def test_replies_of_an_engine_that_is_drained_are_continued_on_another_token_for_token(model_dir, tmp_path):
    ports = [free_port(), free_port()]
    publisher = ShmPublisher("test-engine-drain")
    try:
        with serve(model_dir, ports[0], tmp_path / "a"), serve(model_dir, ports[1], tmp_path / "b"):
            async with EngineClient([f"http://127.0.0.1:{port}" for port in ports], timeout_s=60) as client:
                await client.wait_ready(240)
                await client.update_weights(publisher.publish(1, export_tensors(scratch(1))))
                whole = await client.generate(ask("whole", max_tokens=500))
                running = asyncio.create_task(client.generate(ask("whole", max_tokens=500)))

                async def sampled(url: str) -> float:
                    return (await client.metrics_by_engine())[url]["vllm:generation_tokens_total"]

                begun = {url: await sampled(url) for url in client.urls}
                while not (busy := [url for url in client.urls if await sampled(url) >= begun[url] + 40]):
                    await asyncio.sleep(0)
                [busy] = busy
                await client.drain_engine(busy, 0.0)
                assert not client.fleet.nodes[busy].requests and client.fleet.ready() == [
                    u for u in client.urls if u != busy
                ]
                for one, two in zip(await running, whole, strict=True):
                    assert one.token_ids.tolist() == two.token_ids.tolist() and one.finish_reason == "length"
                    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5, rtol=0)
                    assert [(span.version, span.start, span.end) for span in one.versions] == [(1, 0, 500)]
                [other] = client.fleet.ready()
                assert await sampled(other) - begun[other] < 1000  # it had to sample the rest alone
    finally:
        publisher.close()


async def test_an_engine_that_computes_otherwise_is_not_let_in(model_dir, tmp_path):
    """It gets the same weights, and turns positions by other angles."""
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_text())
    for section in (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        if "rope_theta" in section:
            section["rope_theta"] = 10.0
    (other / "config.json").write_text(json.dumps(config))
    ports = [free_port(), free_port()]
    publisher = ShmPublisher("test-engine-other")
    try:
        with serve(model_dir, ports[0], tmp_path / "a"), serve(other, ports[1], tmp_path / "b"):
            async with EngineClient([f"http://127.0.0.1:{ports[0]}"], timeout_s=60) as client:
                await client.wait_ready(240)
                watching = asyncio.create_task(client.watch())
                loud = {name: 4 * tensor for name, tensor in export_tensors(scratch(1))}
                await client.update_weights(publisher.publish(1, loud.items()))
                await client.add_engine(f"http://127.0.0.1:{ports[1]}")
                async with asyncio.timeout(60):
                    while "computes otherwise" not in client.fleet.nodes[client.urls[1]].reason:
                        await asyncio.sleep(0.05)
                assert client.num_ready == 1
                watching.cancel()
    finally:
        publisher.close()


STALE = """
import sys
from stretto.config.root import InferenceConfig
from stretto.inference import server
from stretto.inference.embedded import core
load = core.load_tensors
def load_but_one(model, tensors):
    norm = model.model.blocks[1].input_layernorm.weight
    before = norm.clone()
    load(model, tensors)
    norm.data[3] = before[3]
core.load_tensors = load_but_one
sys.exit(server.main(InferenceConfig(model=sys.argv[1], server={"port": int(sys.argv[2])})))
"""


@pytest.mark.parametrize("is_stale", [False, True])
async def test_one_number_that_stays_behind_is_found_by_its_bits(model_dir, tmp_path, is_stale):
    """The canary cannot see it: it moves log-probabilities by less than rounding."""
    port, publisher, sums = free_port(), ShmPublisher("test-engine-sums"), GroupSums()
    new = scratch(0)
    with torch.no_grad():
        new.model.blocks[1].input_layernorm.weight[3] *= 1 + 2e-7
    manifest = publisher.publish(1, sums.of(export_tensors(new)))
    manifest = msgspec.structs.replace(manifest, canary=Canary((1, 2), (0.0, -1.0), sums=sums.by_group))
    with (tmp_path / "log").open("wb") as out:
        code = STALE if is_stale else STALE.replace("= load_but_one", "= load")
        child = forked.Popen([sys.executable, "-c", code, str(model_dir), str(port)], stdout=out, stderr=out)
    try:
        async with EngineClient([f"http://127.0.0.1:{port}"], timeout_s=30, max_retries=0) as client:
            await client.wait_ready(240)
            await client.update_weights(manifest)
            [(url, updated)] = client.updated.items()
            assert updated.num_compared == len(sums.by_group) == 4
            if not is_stale:
                updated.check(url, 1)
                return
            message = r"version 1, .* in 1 of 4 groups of tensors: model\.layers\.1\. The bytes came"
            with pytest.raises(EngineError, match=message):
                updated.check(url, 1)
            with pytest.raises(EngineError, match=message):
                await client._restore(url)  # as one that comes back
    finally:
        child.kill()
        child.wait()
        publisher.close()
