"""What one rollout costs the orchestrator: CPU time of its process, ledger, HTTP client and wires included.

    python benchmarks/rollout_cost.py [--quick] [--batch-size 512] [--group-size 8] [--steps 30]

The orchestrator runs as it is. A second process plays the engine (over HTTP) and the trainer (over the real
wires) and does nothing but answer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from stretto.config.root import OrchestratorConfig


def config(directory: str, ports: dict[str, int], args: argparse.Namespace) -> OrchestratorConfig:
    return OrchestratorConfig.model_validate(
        {
            "env": [{"id": "sort-letters"}],
            "batch_size": args.batch_size,
            "group_size": args.group_size,
            "seq_len": 2048,
            "max_steps": args.steps,
            "max_async_level": 1,
            "model": {"scratch": {"max_position_embeddings": 2048}},
            "client": {"base_url": f"http://127.0.0.1:{ports['engine']}/v1"},
            "control": {"port": ports["control"]},
            "rollout_transport": {"type": "zmq", "port": ports["rollouts"]},
            "output_dir": directory,
            "run": {"name": "cost"},
        }
    )


# -- the other process: an engine that knows the answer, a trainer that learns nothing --


async def play_engine(port: int, delay: Callable[[random.Random], float] | None = None) -> None:
    """Half of the replies are right, so that groups have a signal; no model, and no waiting but `delay`."""
    import numpy as np
    from aiohttp import web

    from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
    from stretto.records.generate import Completion, VersionSpan
    from stretto.transports.engine import api, updates
    from stretto.transports.engine.completions import encode_completions

    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(build_letters_tokenizer(directory))
    end = tokenizer.eos_ids[0]
    version = 0

    async def generate(request: web.Request) -> web.Response:
        wanted, _ = api.decode_generate(await request.read())
        prompt = tokenizer.decode(wanted.prompt_ids.tolist())
        letters = prompt.rsplit("user\n", 1)[1].split("<", 1)[0]
        rng = random.Random(wanted.sampling.seed)
        if delay is not None:
            await asyncio.sleep(delay(rng))
        completions = []
        for _ in range(wanted.n):
            text = "".join(sorted(letters)) if rng.random() < 0.5 else letters
            ids = np.array([*tokenizer.encode(text), end], np.int32)
            span = (VersionSpan(version, 0, len(ids)),)
            logprobs = np.full(len(ids), -0.5, np.float32)
            completions.append(Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=span))
        return web.Response(body=encode_completions(wanted, completions, [end] * wanted.n))

    async def update(request: web.Request) -> web.Response:
        nonlocal version
        version = updates.decode_update(await request.read()).manifest.version
        return web.Response(body=b"{}")

    async def fine(request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0.0\n")

    app = web.Application()
    app.add_routes([web.post(api.GENERATE, generate), web.post(api.UPDATE_WEIGHTS, update)])
    steps = (api.PAUSE, api.START_UPDATE, api.FINISH_UPDATE, api.RESUME)
    app.add_routes([web.post(path, fine) for path in steps])
    app.add_routes([web.get(path, fine) for path in (api.HEALTH, api.LIVENESS, api.METRICS)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def play_trainer(cfg: OrchestratorConfig) -> None:
    from stretto.base.secret import load_secret
    from stretto.records.control import Bye, Register, StepDone, VersionReady
    from stretto.records.weight_manifest import WeightManifest
    from stretto.transports.control import ControlClient
    from stretto.transports.rollouts import build_receiver

    control = ControlClient(cfg.control, cfg.run_name, load_secret(cfg.run_dir))
    control.register(Register())
    receiver = build_receiver(cfg.rollout_transport, cfg.run_dir, 0, control.session)

    def publish(version: int) -> None:
        empty = WeightManifest(version=version, transport="shm", location="-", shards=(), tensors=(), checksum=0)
        control.send(VersionReady(manifest=empty))

    publish(0)
    for step in range(1, cfg.max_steps + 1):
        batch = receiver.receive(60.0)
        assert batch.step == step
        control.send(StepDone(step=step, metrics={"loss/mean": 0.0, "mismatch_kl/mean": 0.0}))
        publish(step)
    control.send(Bye())
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def play_others(args: argparse.Namespace) -> None:
    ports = json.loads(args.others)
    cfg = config(args.directory, ports, args)
    threading.Thread(target=play_trainer, args=(cfg,), daemon=True).start()
    asyncio.run(play_engine(ports["engine"]))


# -- the measured process --


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(cfg: OrchestratorConfig) -> tuple[list[float], list[float]]:
    """CPU and wall seconds of every step but the first ones, which pay for warming up."""
    from contextlib import AsyncExitStack

    from stretto.base.runtime import collect_on_growth
    from stretto.orchestrator.build import build_scratch_renderer
    from stretto.orchestrator.main import build_loop, open_wires
    from stretto.orchestrator.state.run_checkpoint import Progress

    renderer = build_scratch_renderer(cfg.model.scratch, cfg.renderer)
    marks: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        loop = build_loop(cfg, await open_wires(cfg, 0, stack), renderer, Progress(), stack)
        await stack.enter_async_context(collect_on_growth())  # as in a run
        log = loop.parts.monitors.log

        def mark(step: int, metrics: dict[str, float]) -> None:
            log(step, metrics)
            marks.append((cpu_s(), time.perf_counter()))

        loop.parts.monitors.log = mark
        await loop.run()
    pairs = list(itertools.pairwise(marks[2:]))
    return [b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--others", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.steps = 10
    if args.others:
        return play_others(args)
    import socket

    from stretto.ledger.audit import audit

    sockets = [socket.socket() for _ in range(3)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = dict(zip(("engine", "control", "rollouts"), (probe.getsockname()[1] for probe in sockets)))
    for probe in sockets:
        probe.close()
    with tempfile.TemporaryDirectory() as directory:
        cfg = config(directory, ports, args)
        sizes = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("batch-size", "group-size", "steps")]
        others = subprocess.Popen(
            [sys.executable, __file__, "--others", json.dumps(ports), "--directory", directory, *sizes]
        )
        try:
            cpu, wall = asyncio.run(measure(cfg))
        finally:
            others.kill()
            others.wait()
        broken = audit(cfg.run_dir)
        ledger_bytes = cfg.run_dir.ledger.stat().st_size
        token_bytes = sum(file.stat().st_size for file in cfg.run_dir.tokens.iterdir())
    assert not broken, broken
    cpu_ms, wall_ms = ([1e3 * s for s in times] for times in (cpu, wall))
    num_rollouts = args.batch_size * args.steps
    print(f"{args.batch_size} rollouts per step in groups of {args.group_size}, {len(cpu)} steps measured")
    print(
        json.dumps(
            {
                "cpu_ms_per_step_p50": round(statistics.median(cpu_ms), 2),
                "cpu_ms_per_step_p10": round(sorted(cpu_ms)[len(cpu_ms) // 10], 2),
                "cpu_ms_per_step_mean": round(statistics.fmean(cpu_ms), 2),
                "cpu_us_per_rollout": round(1e3 * statistics.fmean(cpu_ms) / args.batch_size, 1),
                "wall_ms_per_step_p50": round(statistics.median(wall_ms), 2),
                "ledger_bytes_per_rollout": round(ledger_bytes / num_rollouts),
                "token_bytes_per_rollout": round(token_bytes / num_rollouts),
                "torch_imported": "torch" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main()
