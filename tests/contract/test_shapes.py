"""`inference` as several processes: replicas behind a router, on one machine and on several addresses of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import aiohttp
import numpy as np
import pytest
from ports import free_port, free_ports_in_a_row
from servers import logprobs_of, needs_vllm, save, scratch, serve

from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient

PROMPT = np.arange(20, 50, dtype=np.int32)
needs_router = pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed")


async def check(url: str, engines: list[str]) -> None:
    """Rollouts go to one address, are correct, and stay with one engine; both engines get some."""
    async with EngineClient([url], engines, timeout_s=120, max_retries=20) as client:
        await client.wait_ready(240)
        for turn in range(2):
            for session in range(12):
                sampling = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
                request = GenerateRequest(
                    request_id=f"{session}-{turn}",
                    prompt_ids=PROMPT,
                    sampling=sampling,
                    session_id=f"rollout-{session}",
                )
                [completion] = await client.generate(request)
                expected = logprobs_of(scratch(0), np.concatenate([PROMPT, completion.token_ids]))
                np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=2e-5, rtol=0)
    counts = []
    for engine in engines:
        async with EngineClient([engine]) as client:
            counts.append((await client.metrics())["vllm:request_success_total"])
    assert sum(counts) == 24 and all(count and count % 2 == 0 for count in counts), counts


@pytest.mark.slow
@needs_router
def test_replicas_by_hand_are_behind_a_router_and_end_with_it(tmp_path):
    port, backend = free_port(), free_ports_in_a_row(2)
    words = ("--deployment.num-replicas", "2", "--deployment.router-port", str(port))
    words += ("--deployment.backend-port", str(backend), "--router-disable-retries", "--num-threads", "1")
    with serve("embedded", save(scratch(0), tmp_path / "model"), tmp_path / "log", *words) as (_, child):
        engines = [f"http://127.0.0.1:{backend + i}" for i in range(2)]
        asyncio.run(check(f"http://127.0.0.1:{port}", engines))
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(60) == 0
    assert "router" in (tmp_path / "log").read_text()


@needs_router
def test_a_router_asks_for_the_engines_key_on_all_its_routes(tmp_path):
    port, backend = free_port(), free_ports_in_a_row(2)
    words = ("--deployment.num-replicas", "2", "--deployment.router-port", str(port))
    words += ("--deployment.backend-port", str(backend), "--num-threads", "1")
    bodies = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 3, "ignore_eos": True},
        "/v1/chat/completions": {
            "model": str(tmp_path / "model"),
            "messages": [{"role": "user", "content": "abc"}],
            "max_tokens": 3,
        },
        api.GENERATE: {"token_ids": [20, 21], "sampling_params": {"max_tokens": 3, "ignore_eos": True}},
    }

    async def ask() -> None:
        url = f"http://127.0.0.1:{port}"
        async with EngineClient([url], api_key="k") as client:
            await client.wait_ready(120)
        async with aiohttp.ClientSession() as http:
            for path, body in bodies.items():
                async with http.post(url + path, json=body, headers={"Authorization": "Bearer k"}) as answer:
                    text = await answer.text()
                    assert answer.status == 200 and json.loads(text)["choices"], (path, text)
            for key in ({}, {"Authorization": "Bearer K"}, {"Authorization": "Basic k"}):
                for path, body in bodies.items():
                    async with http.post(url + path, json=body, headers=key) as answer:
                        assert answer.status == 401, path
                for path in ("/add_worker", "/remove_worker"):
                    engine = {"url": f"http://127.0.0.1:{backend}"}
                    async with http.post(url + path, params=engine, headers=key) as answer:
                        assert answer.status == 401, path
                for path in (api.READINESS, "/health", "/workers", "/list_workers", "/v1/models"):
                    async with http.get(url + path, headers=key) as answer:
                        assert answer.status == 401, path
                async with http.post(url + "/flush_cache", headers=key) as answer:
                    assert answer.status == 401

    model = save(scratch(0), tmp_path / "model")
    with serve("embedded", model, tmp_path / "log", *words, env={"VLLM_API_KEY": "k"}):
        asyncio.run(ask())


@pytest.mark.slow
@needs_router
@needs_vllm
def test_each_node_runs_its_own_engine_and_the_first_the_router(tmp_path):
    model, port, backend = save(scratch(0), tmp_path / "model"), free_port(), free_port()
    words = ["--model", str(model), "--output-dir", str(tmp_path), "--max-model-len", "512", "--device", "cpu"]
    words += ["--hosts", "127.0.0.1", "127.0.0.2", "--deployment.type", "multi_node"]
    words += ["--deployment.router-port", str(port), "--deployment.backend-port", str(backend)]
    nodes = [
        subprocess.Popen([sys.executable, "-m", "stretto", "inference", *words, "--node-rank", str(rank)])
        for rank in range(2)
    ]
    try:
        engines = [f"http://127.0.0.{1 + i}:{backend}" for i in range(2)]
        asyncio.run(check(f"http://127.0.0.1:{port}", engines))
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        assert [node.wait(60) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["--model", str(tmp_path), "--output-dir", str(tmp_path), "--deployment.num-replicas", "2"]
        words += ["--router", "None", "--deployment.backend-port", str(taken.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-m", "stretto", "inference", *words], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2 and "http of inference_0) is taken" in done.stderr
