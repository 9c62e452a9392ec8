"""Engines that join and leave behind a vllm-router: does throughput follow their number?

    python benchmarks/router_queues.py [--policy round_robin] [--stage 9] [--rate 25] [--unlimited]

A real vllm-router, the orchestrator's real client, and engines of which only the HTTP is real: each answers so many
requests per second on average, of random length, in the order in which they come, and says that at most 24 run and the
others wait. The client always has 288 requests open. Every stage an engine joins, until there are four, and then one
leaves, until there is one. The figure is the part of the last 60 % of each stage in which engines had something to do,
on average. `--unlimited`: the client sends the router all that it has, whatever queues engines have
(transports/engine/gate.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from aiohttp import web
from ports import free_port

from stretto.config.sections.engines import ADMITTED
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api, dispatch
from stretto.transports.engine import gate as window
from stretto.transports.engine.client import EngineClient

RUNNING, OPEN, MOST = 24, 288, 4
ANSWER = json.dumps(
    {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [{"logprob": 0.0}]}}]}
).encode()


class Engine:
    """Answers `rate` requests per second, first come, first served."""

    def __init__(self, rate: float) -> None:
        self.rate, self.open, self.free_at, self.busy_s, self.random = rate, 0, 0.0, 0.0, random.Random(0)

    async def start(self) -> str:
        app, url = web.Application(), free_port()
        app.add_routes([web.post(api.GENERATE, self.generate), web.get(api.METRICS, self.metrics)])
        app.add_routes([web.get(path, fine) for path in (api.LIVENESS, api.HEALTH, ADMITTED, api.MODELS)])
        app.add_routes([web.post(path, fine) for path in (api.ADMIT, api.ABORT)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", url).start()
        return f"http://127.0.0.1:{url}"

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        self.open += 1
        try:
            now = time.monotonic()
            length_s = self.random.expovariate(self.rate)
            self.free_at = max(self.free_at, now) + length_s
            await asyncio.sleep(self.free_at - now)
        finally:
            self.open -= 1
        self.busy_s += length_s
        return web.Response(body=ANSWER, content_type="application/json")

    async def metrics(self, _: web.Request) -> web.Response:
        running = min(self.open, RUNNING)
        return web.Response(text=f"{window.RUNNING} {running}\n{window.WAITING} {self.open - running}\n")


async def fine(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "model"}]})


async def play(client: EngineClient, numbers: itertools.count[int]) -> None:
    """One rollout after the other, each of one request with a session of its own."""
    while True:
        name = f"rollout-{next(numbers)}"
        sampling = SamplingParams(max_tokens=4)
        request = GenerateRequest(
            request_id=name, prompt_ids=np.arange(4, dtype=np.int32), sampling=sampling, session_id=name
        )
        await client.generate(request)


async def measure(args: argparse.Namespace) -> dict[str, object]:
    engines = [Engine(args.rate) for _ in range(MOST)]
    urls = [await engine.start() for engine in engines]
    port = free_port()
    words = ["--worker-urls", urls[0], "--policy", args.policy, "--host", "127.0.0.1", "--port", str(port)]
    router = subprocess.Popen(
        [sys.executable, "-m", "stretto_routers.router", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if args.unlimited:
        window.INTERVAL_S, dispatch.FIRST = 1e9, 1e9
    shares: dict[str, list[float]] = {}
    sent: list[float] = []
    leaving: list[asyncio.Task[None]] = []
    try:
        client = EngineClient([f"http://127.0.0.1:{port}"], [urls[0]], timeout_s=600, liveness_interval_s=0.5)
        async with client:
            await client._wait_for_router()
            watching = asyncio.create_task(client.watch())
            numbers = itertools.count()
            players = [asyncio.create_task(play(client, numbers)) for _ in range(OPEN)]
            for stage in range(2 * MOST - 1):
                number = stage + 1 if stage < MOST else 2 * MOST - 1 - stage
                if 0 < stage < MOST:
                    await client.add_engine(urls[stage])
                elif stage:
                    leaving.append(asyncio.create_task(leave(client, urls[number])))
                await asyncio.sleep(0.4 * args.stage)
                before, at = sum(engine.busy_s for engine in engines), time.monotonic()
                await asyncio.sleep(0.6 * args.stage)
                busy = (sum(engine.busy_s for engine in engines) - before) / (time.monotonic() - at)
                shares.setdefault(str(number), []).append(round(busy / number, 3))
                sent.append(sum(engine.open for engine in engines))
                print(number, shares[str(number)][-1], [engine.open for engine in engines], flush=True)
            for task in (*players, *leaving, watching):
                task.cancel()
            await asyncio.gather(*players, *leaving, watching, return_exceptions=True)
    finally:
        router.terminate()
        router.wait()
        for engine in engines:
            await engine.runner.cleanup()
    flat = {number: sum(each) / len(each) for number, each in shares.items()}
    mean = sum(flat.values()) / len(flat)
    return {
        "policy": args.policy, "unlimited": args.unlimited, "share": shares, "at_engines": sent,
        "deviation": round(max(abs(each / mean - 1) for each in flat.values()), 3),
    }  # fmt: skip


async def leave(client: EngineClient, url: str) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await client.drain_engine(url, wait_s=1.0)
        client.forget_engine(url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--stage", type=float, default=9.0, metavar="S")
    parser.add_argument("--rate", type=float, default=25.0, help="requests that an engine answers per second")
    parser.add_argument("--unlimited", action="store_true")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
