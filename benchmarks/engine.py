"""The embedded engine alone: decode speed against transformers' `generate`, and what a step costs.

    python benchmarks/engine.py [--quick]

One thread. Both engines take turns in one process on the same random Qwen3, prompts and lengths, so that
whatever else the machine does falls on both; figures are medians. `cpu` figures are process time and do not
depend on other load much. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from stretto.base.runtime import keep_freed_memory
from stretto.config.sections.model import ScratchSection
from stretto.inference.embedded import runner as runner_module
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.inference.embedded.engine import Engine, running
from stretto.models.hub import export_tensors, random_model, save_hf
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.shm import ShmPublisher

PROMPT_TOKENS = 32
MODELS = {
    "0.1M": (ScratchSection(hidden_size=64, num_layers=2), 64),
    "1M": (ScratchSection(hidden_size=128, intermediate_size=512, num_layers=4, head_dim=32), 112),
}


def prompts(count: int, vocab: int, seed: int, length: int = PROMPT_TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, vocab, (count, length)).astype(np.int32)


def run_core(core: EngineCore, name: str, ids: np.ndarray, max_tokens: int, n: int = 1) -> int:
    """Submit a row of prompts at once and step until all are done; returns the number of steps."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    for i, row in enumerate(ids):
        asked = GenerateRequest(request_id=f"{name} {i}", prompt_ids=row, n=n, sampling=sampling)
        core.submit(core.build_request(asked))
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    return steps


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def against_transformers(size: str, batch: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of both, in turns."""
    from transformers import AutoModelForCausalLM

    scratch, vocab = MODELS[size]
    model = random_model(scratch, vocab)
    core = EngineCore(model, CoreSettings(enable_prefix_caching=False))
    with tempfile.TemporaryDirectory() as directory:
        save_hf(model, directory)
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def generate(ids: np.ndarray) -> None:
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.inference_mode():
            theirs.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, max_new_tokens=max_tokens, min_new_tokens=max_tokens, pad_token_id=0,
            )  # fmt: skip

    ours, others = [], []
    for i in range(rounds + 1):
        ids = prompts(batch, vocab, i)
        ours.append(measure(lambda ids=ids, i=i: run_core(core, str(i), ids, max_tokens)))
        others.append(measure(lambda ids=ids: generate(ids)))
    tokens = batch * max_tokens
    ours, others = ours[1:], others[1:]
    wall, cpu = (statistics.median(t[k] for t in ours) for k in (0, 1))
    their_wall, their_cpu = (statistics.median(t[k] for t in others) for k in (0, 1))
    return {
        "tokens_per_s": round(tokens / wall),
        "tokens_per_cpu_s": round(tokens / cpu),
        "transformers_tokens_per_s": round(tokens / their_wall),
        "transformers_tokens_per_cpu_s": round(tokens / their_cpu),
        "ratio_cpu": round(their_cpu / cpu, 2),
        "step_cpu_ms": round(cpu / (max_tokens + 1) * 1e3, 3),
    }


def demo_step(rounds: int) -> dict[str, float]:
    """CPU of one training step's generation: 64 prompts of 20 tokens x 8 samples x 7 tokens."""
    scratch, vocab = MODELS["0.1M"]
    core = EngineCore(random_model(scratch, vocab), CoreSettings())
    times = [measure(lambda i=i: run_core(core, str(i), prompts(64, vocab, i, 20), 7, n=8))[1] for i in range(rounds)]
    return {"cpu_ms": round(statistics.median(times) * 1e3, 1), "best_cpu_ms": round(min(times) * 1e3, 1)}


def price_of_equal_bits(rounds: int) -> dict[str, float]:
    """What padding rows to a multiple of 16 costs, by decode batch: CPU with it relative to CPU without.

    Engines pad where products are not their own (native/products.py).
    """
    scratch, vocab = MODELS["0.1M"]
    core = EngineCore(random_model(scratch, vocab), CoreSettings(enable_prefix_caching=False))
    padding, out = runner_module._ROW_MULTIPLE, {}
    has_own_products = core.runner.has_own_products
    for batch in (1, 8, 17, 64):
        cost: dict[int, list[float]] = {padding: [], 1: []}
        for i in range(2 * rounds):
            multiple = runner_module._ROW_MULTIPLE = (padding, 1)[i % 2]
            core.runner.has_own_products = has_own_products and multiple == 1
            ids = prompts(batch, vocab, i // 2)
            cost[multiple].append(measure(lambda i=i, ids=ids: run_core(core, str(i), ids, 32))[1])
        out[str(batch)] = round(statistics.median(cost[padding]) / statistics.median(cost[1]), 3)
    runner_module._ROW_MULTIPLE = padding
    return out


async def busy_update(rounds: int) -> dict[str, float]:
    """New weights of the 1M model into an engine that is decoding 64 sequences, by shared memory."""
    scratch, vocab = MODELS["1M"]
    model = random_model(scratch, vocab)
    weights = [(name, tensor.clone()) for name, tensor in export_tensors(model)]
    publisher = ShmPublisher("bench-engine")
    sampling = SamplingParams(max_tokens=300, ignore_eos=True)
    times = []
    try:
        async with running(Engine(EngineCore(model, CoreSettings()))) as engine:
            asked = [
                GenerateRequest(request_id=str(i), prompt_ids=row, sampling=sampling)
                for i, row in enumerate(prompts(64, vocab, 0))
            ]
            tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
            while len(engine.core.scheduler.running) < 64:
                await asyncio.sleep(0.001)
            for version in range(1, rounds + 1):
                manifest = publisher.publish(version, weights)
                started = time.perf_counter()
                await engine.update(manifest)
                times.append(time.perf_counter() - started)
                publisher.release(version - 1)
                await asyncio.sleep(0.01)
            done = await asyncio.gather(*tasks)
            loading = engine.metrics.update_s / rounds
    finally:
        publisher.close()
    whole = sum(len(request.completions[0].token_ids) == 300 for request in done)
    return {
        "update_ms": round(statistics.median(times) * 1e3, 1),
        "of_which_loading_ms": round(loading * 1e3, 1),
        "requests": 64,
        "requests_finished": whole,
        "versions_in_one_request": len(done[0].completions[0].versions),
    }


async def over_http(rounds: int) -> dict[str, float]:
    """A training step's generation through the server in a process of its own, and how soon it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scratch, vocab = MODELS["0.1M"]
    with tempfile.TemporaryDirectory() as directory:
        save_hf(random_model(scratch, vocab, eos_token_id=1), directory)
        words = ["inference", "--model", directory, "--server.port", str(port), "--num-threads", "1"]
        started = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "stretto", *words, "--output-dir", directory], stderr=subprocess.DEVNULL
        )
        try:
            async with EngineClient([f"http://127.0.0.1:{port}"]) as client:
                await client.wait_ready(120)
                ready = time.perf_counter() - started
                server, own, wall = [], [], []
                for i in range(rounds + 2):
                    asked = [
                        GenerateRequest(
                            request_id=f"{i} {k}", prompt_ids=row, n=8, cache_salt="0",
                            sampling=SamplingParams(max_tokens=7, ignore_eos=True, seed=k),
                        )
                        for k, row in enumerate(prompts(64, vocab, i, 20))
                    ]  # fmt: skip
                    before, cpu, start = _cpu_s(child.pid), time.process_time(), time.perf_counter()
                    await asyncio.gather(*(client.generate(one) for one in asked))
                    wall.append(time.perf_counter() - start)
                    own.append(time.process_time() - cpu)
                    server.append(_cpu_s(child.pid) - before)
        finally:
            child.terminate()
            child.wait()
    middle = lambda values: round(statistics.median(values[2:]) * 1e3, 1)
    return {
        "ready_s": round(ready, 2),
        "step_wall_ms": middle(wall),
        "step_server_cpu_ms": middle(server),
        "step_client_cpu_ms": middle(own),
        "client_cpu_us_per_rollout": round(statistics.median(own[2:]) / 512 * 1e6, 1),
    }


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    figures: dict[str, object] = {"torch": torch.__version__, "freed_memory_is_kept": keep_freed_memory()}
    max_tokens, rounds = (32, 2) if quick else (64, 7)
    for size in MODELS:
        for batch in (1, 16, 64):
            figures[f"decode {size} batch {batch}"] = against_transformers(size, batch, max_tokens, rounds)
            print(size, batch, figures[f"decode {size} batch {batch}"], flush=True)
    figures["demo step"] = demo_step(8 if quick else 40)
    figures["padding cost"] = price_of_equal_bits(3 if quick else 15)
    figures["weight update"] = asyncio.run(busy_update(5 if quick else 20))
    figures["http"] = asyncio.run(over_http(4 if quick else 20))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
