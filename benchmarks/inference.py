"""The embedded engine and vLLM on the same model, as servers: start, memory, tokens per second, the router's price.

    python benchmarks/inference.py [--quick]

Both serve one random network (float32, one thread) as processes of their own, one after the other, and answer
the same requests over HTTP: 64 prompts of 32 tokens with 64 new tokens each at once, and one alone. `cpu` figures
are what all processes of a server used, which other load on the machine changes little. vLLM is left out where it
is not installed (`make vllm`), the router where vllm-router is not. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import psutil

from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models.hub import export_tensors, random_model, save_hf
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.shm import ShmPublisher

VOCAB = 112
MODELS = {
    "0.2M": ScratchSection(num_heads=2, num_kv_heads=1, head_dim=32),
    "1M": ScratchSection(hidden_size=128, intermediate_size=512, num_layers=4, head_dim=32),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serve(engine: str, model: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    port = free_port()
    words = ["inference", "--model", str(model), "--engine", engine, "--server.port", str(port)]
    words += ["--max-model-len", "512", "--output-dir", str(model.parent)]
    with (model.parent / f"{engine}.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "stretto", *words], stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", child
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def router(url: str) -> Iterator[str]:
    port = free_port()
    words = ["--worker-urls", url, "--port", str(port), "--policy", "consistent_hash", "--log-level", "error"]
    words += ["--prometheus-port", str(free_port())]
    child = subprocess.Popen(
        [sys.executable, "-m", "vllm_router.launch_router", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and its descendants."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory_mb(pid: int) -> float:
    """Proportional share of memory of a process and its descendants, MB."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def request(name: str, tokens: int, seed: int) -> GenerateRequest:
    ids = np.random.default_rng(seed).integers(10, 100, 32).astype(np.int32)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
    return GenerateRequest(request_id=name, prompt_ids=ids, sampling=sampling)


async def rounds(client: EngineClient, label: str, width: int, tokens: int, repeats: int) -> float:
    """Median tokens per second over repeats of `width` requests at once."""
    speeds = []
    for again in range(repeats + 1):
        asked = [request(f"{label}-{again}-{i}", tokens, again * width + i) for i in range(width)]
        started = time.perf_counter()
        await asyncio.gather(*map(client.generate, asked))
        speeds.append(width * tokens / (time.perf_counter() - started))
    return statistics.median(speeds[1:])


async def latency_ms(client: EngineClient, label: str, repeats: int) -> float:
    """Median time of a request of one token."""
    times = []
    for again in range(repeats):
        started = time.perf_counter()
        await client.generate(request(f"{label}-{again}", 1, 7))
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


async def measure(engine: str, model: Path, network, repeats: int) -> dict[str, float]:
    started = time.perf_counter()
    with serve(engine, model) as (url, child):
        async with EngineClient([url], timeout_s=300) as client:
            await client.wait_ready(300)
            ready_s = time.perf_counter() - started
            row = {"ready_s": ready_s, "ready_cpu_s": cpu_s(child.pid)}
            used = cpu_s(child.pid)
            row["tokens_per_s_64"] = await rounds(client, "wide", 64, 64, repeats)
            row["cpu_ms_per_1k_tokens"] = (cpu_s(child.pid) - used) / ((repeats + 1) * 64 * 64) * 1e6
            row["tokens_per_s_1"] = await rounds(client, "one", 1, 64, repeats)
            publisher = ShmPublisher("bench-inference")
            updates = []
            for version in range(1, 2 + repeats):
                manifest = publisher.publish(version, export_tensors(network))
                began = time.perf_counter()
                await client.update_weights(manifest)
                updates.append((time.perf_counter() - began) * 1e3)
                publisher.release(version)
            publisher.close()
            row["update_ms"] = statistics.median(updates[1:])
            row["memory_mb"] = memory_mb(child.pid)
            row["latency_ms"] = await latency_ms(client, "direct", 30 * repeats)
            if find_spec("vllm_router") is not None:
                with router(url) as address:
                    async with EngineClient([address], [url], timeout_s=300) as routed:
                        await routed._wait_for_router()
                        row["latency_routed_ms"] = await latency_ms(routed, "routed", 30 * repeats)
    return {name: round(value, 2) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model, one round")
    quick = parser.parse_args().quick
    engines = ["embedded"] + (["vllm"] if find_spec("vllm") is not None else [])
    results: dict[str, dict] = {}
    for name, section in list(MODELS.items())[: 1 if quick else None]:
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model"
            build_letters_tokenizer(model)
            network = random_model(section, VOCAB, eos_token_id=2)
            save_hf(network, model, model)
            for engine in engines:
                results[f"{name} {engine}"] = row = asyncio.run(measure(engine, model, network, 1 if quick else 5))
                print(f"{name:5} {engine:9} " + "  ".join(f"{k} {v:g}" for k, v in row.items()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
