"""Routers that engines enter themselves: a real vllm-router that runs elsewhere, and Dynamo's frontend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
from ports import free_port, free_ports_in_a_row
from processes import forked
from servers import logprobs_of, save, scratch, serve, stop
from waiting import until

from stretto.base.errors import EngineError
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto_routers.kinds import MADE

PROMPT = np.arange(20, 50, dtype=np.int32)
needs_router = pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed")
needs_dynamo = pytest.mark.skipif(
    not (Path(sys.prefix) / MADE).exists(), reason="Dynamo is not installed: `make dynamo`"
)


def request(session: int, num_samples: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4, seed=session, ignore_eos=True)
    return GenerateRequest(
        request_id=f"r-{session}", prompt_ids=PROMPT, sampling=sampling, n=num_samples, session_id=f"rollout-{session}"
    )


def assert_exact(completions: list[Completion]) -> None:
    for completion in completions:
        assert len(completion.token_ids) == 4 and completion.versions[-1].end == 4
        expected = logprobs_of(scratch(0), np.concatenate([PROMPT, completion.token_ids]))
        np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=2e-5, rtol=0)


async def num_served(engines: list[str]) -> list[float]:
    counts = []
    for engine in engines:
        async with EngineClient([engine], api_key="k") as client:
            counts.append((await client.metrics())["vllm:request_success_total"])
    return counts


def kill_one(launcher: int, engine: str) -> None:
    """kill -9 of the process that listens where this engine does."""
    port = int(engine.rpartition(":")[2])
    for child in psutil.Process(launcher).children(recursive=True):
        if any(at.laddr.port == port and at.status == "LISTEN" for at in child.net_connections("tcp")):
            child.kill()
            return
    raise AssertionError(f"nobody listens at {engine}")


# -- vllm-router --


NO_ANSWER = ["no answer"]


@contextlib.contextmanager
def router_elsewhere(log: Path, port: int, key: str, *more: str) -> Iterator[str]:
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words += [
        "--policy",
        "consistent_hash",
        "--health-check-interval-secs",
        "600",
        *more,
    ]  # it finds out nothing by itself
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "stretto_routers.router", *words],
            stdout=out,
            stderr=out,
            env={**os.environ, "VLLM_API_KEY": key},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(until(lambda: listed(url) != NO_ANSWER))
        yield url
    finally:
        stop(child)


def listed(router: str) -> list[str]:
    asked = urllib.request.Request(router + "/list_workers", headers={"Authorization": "Bearer k"})
    with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=10) as answer:
        return sorted(json.load(answer)["urls"])
    return NO_ANSWER


@pytest.mark.slow
@needs_router
def test_engines_enter_a_router_leave_it_when_killed_and_come_back(tmp_path):
    model, port, backend = save(scratch(0), tmp_path / "model"), free_port(), free_ports_in_a_row(2)
    engines = [f"http://127.0.0.1:{backend + i}" for i in range(2)]
    words = ["--router.address", f"http://127.0.0.1:{port}", "--num-threads", "1"]
    words += ["--deployment.num-replicas", "2", "--deployment.backend-port", str(backend)]

    async def run(router: str, launcher: subprocess.Popen) -> None:
        await until(lambda: listed(router) == engines)
        async with EngineClient([router], engines, "k", timeout_s=120, max_retries=20) as client:
            for session in range(40):  # where the hash puts a session depends on the ports
                assert_exact(await client.generate(request(session)))
            assert all(await num_served(engines))
            kill_one(launcher.pid, engines[0])
            await until(lambda: listed(router) == engines[1:])
            await until(lambda: listed(router) == engines)
            for session in range(8):
                assert_exact(await client.generate(request(session)))
            watching = asyncio.ensure_future(client.watch())
            await client.drain_engine(engines[0], 1.0)
            for _ in range(20):  # it is as well as before, and the registrar does not enter it again
                assert listed(router) == engines[1:]
                await asyncio.sleep(0.1)
            await client.add_engine(engines[0])
            await until(lambda: listed(router) == engines)
            watching.cancel()

    log = tmp_path / "router.log"
    with contextlib.ExitStack() as processes:
        with router_elsewhere(log, port, "k") as router:
            # An engine that is forked when it comes back would be back before the router's list is looked at.
            env = {"VLLM_API_KEY": "k", forked.NUM_SPARES_VAR: "2"}
            serving = serve("embedded", model, tmp_path / "log", *words, env=env)
            _, launcher = processes.enter_context(serving)
            asyncio.run(run(router, launcher))
        with router_elsewhere(log, port, "k") as router:  # it has lost its list
            asyncio.run(until(lambda: listed(router) == engines))
            os.kill(launcher.pid, signal.SIGTERM)
            assert launcher.wait(60) == 0
            assert listed(router) == []


@pytest.mark.slow
@needs_router
def test_engines_join_a_router_and_leave_it_and_hand_over_their_replies_token_for_token(tmp_path: Path) -> None:
    model, words, environment = save(scratch(0), tmp_path / "model"), ["--num-threads", "1"], {"VLLM_API_KEY": "k"}
    with contextlib.ExitStack() as stack:
        served = [
            stack.enter_context(serve("embedded", model, tmp_path / f"log{i}", *words, env=environment))
            for i in range(3)
        ]
        engines = [url for url, _ in served]

        async def ready() -> None:
            async with EngineClient(engines, api_key="k") as client:
                await client.wait_ready(240)

        async def run(router: str) -> None:
            async with EngineClient([router], engines[:2], "k", timeout_s=120, liveness_interval_s=0.2) as client:
                watching = asyncio.ensure_future(client.watch())

                async def generate(session: int) -> Completion:
                    [found] = await client.generate(
                        GenerateRequest(
                            request_id=f"long-{session}",
                            prompt_ids=PROMPT,
                            sampling=SamplingParams(max_tokens=400, seed=session, ignore_eos=True),
                            session_id=f"long-{session}",
                        )
                    )
                    return found

                async def leave(engine: str) -> list[Completion]:
                    """What was being sampled while it left, after wait_s = 0."""
                    replies = [asyncio.ensure_future(generate(session)) for session in range(24)]
                    async with asyncio.timeout(60):
                        while not await client._handover.num_requests(engine):
                            await asyncio.sleep(0.01)
                    await client.drain_engine(engine, 0.0)
                    assert await client._handover.num_requests(engine) == 0
                    return await asyncio.gather(*replies)

                whole = await asyncio.gather(*(generate(session) for session in range(24)))
                for found, expected in zip(await leave(engines[1]), whole):
                    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
                    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5, rtol=0)
                assert listed(router) == [engines[0]] and client._handover.num_handovers
                client.forget_engine(engines[1])
                before = await num_served(engines[1:2])
                for session in range(20):
                    assert_exact(await client.generate(request(session)))
                assert await num_served(engines[1:2]) == before
                await client.add_engine(engines[2])
                await until(lambda: listed(router) == sorted(engines[::2]))
                await asyncio.gather(*(generate(session) for session in range(24)))
                assert all(await num_served(engines[2:]))
                served[2][1].kill()
                await until(lambda: listed(router) == [engines[0]])
                assert_exact(await client.generate(request(0)))
                watching.cancel()

        asyncio.run(ready())
        workers = ["--worker-urls", *engines[:2], "--health-check-endpoint", "/admitted"]
        router = stack.enter_context(router_elsewhere(tmp_path / "router.log", free_port(), "k", *workers))
        asyncio.run(run(router))


@needs_router
def test_a_router_between_prefill_and_decode_engines_keeps_those_that_it_was_started_with(tmp_path: Path) -> None:
    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", free_port()), Engine) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    prefill, decode = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    words = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode]

    async def run(router: str) -> None:
        async with EngineClient([router], [prefill, decode], "k") as client:
            with pytest.raises(EngineError, match=r"keeps those that it was started with: it would go on sending"):
                await client.drain_engine(decode, 1.0)

    with router_elsewhere(tmp_path / "router.log", free_port(), "k", *words) as router:
        before = listed(router)
        asyncio.run(run(router))
        assert listed(router) == before
    for server in servers:
        server.shutdown()
        server.server_close()


@needs_router
def test_a_router_that_does_not_answer_is_one_message_and_no_engine_is_started(tmp_path):
    model, port = save(scratch(0), tmp_path / "model"), free_port()
    words = ["--router.address", f"http://127.0.0.1:{port}"]
    with serve("embedded", model, tmp_path / "log", *words) as (_, launcher):
        assert launcher.wait(120) == 2
    text = (tmp_path / "log").read_text()
    assert f"inference.router.address = http://127.0.0.1:{port}: nothing answers there" in text
    assert "Traceback" not in text and "start the router first" in text


# -- Dynamo --


@needs_dynamo
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["kv", "round_robin", "session_affinity"])
def test_tokens_and_logprobs_are_exact_through_dynamo(policy: str, tmp_path: Path) -> None:
    model, backend = save(scratch(0), tmp_path / "model"), free_ports_in_a_row(2)
    engines = [f"http://127.0.0.1:{backend + i}" for i in range(2)]
    words = ["--router.type", "dynamo", "--router.policy", policy, "--num-threads", "1"]
    words += ["--deployment.num-replicas", "2", "--deployment.backend-port", str(backend)]

    async def run(router: str, launcher: subprocess.Popen) -> None:
        async with EngineClient([router], engines, "k", timeout_s=240, max_retries=20) as client:
            await client.wait_ready(240)
            for _ in range(2):
                for session in range(8):
                    [completion] = await client.generate(request(session))
                    assert_exact([completion])
            counts = await num_served(engines)
            assert sum(counts) == 16
            if policy == "session_affinity":
                assert all(count and count % 2 == 0 for count in counts), counts
            elif policy == "round_robin":
                assert all(counts), counts
            samples = await client.generate(request(99, num_samples=3))
            assert_exact(samples)
            assert len({completion.token_ids.tobytes() for completion in samples}) > 1
            if policy != "kv":
                return
            kill_one(launcher.pid, engines[0])
            for session in range(20, 28):
                assert_exact(await client.generate(request(session)))
            await client.wait_ready(240)

    environment = {"VLLM_API_KEY": "k"}
    with serve("embedded", model, tmp_path / "log", *words, env=environment) as (router, launcher):
        asyncio.run(run(router, launcher))
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(60) == 0
