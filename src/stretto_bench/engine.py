"""`inference --bench`: start an engine and send it rounds of requests of one shape; the first round is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import ConfigError, EngineError
from stretto.base.process import bound, visible_gpus
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig
from stretto.data.hub_model import find_config
from stretto.data.model_file import read_model_file
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto_bench.memory import MemorySampler
from stretto_bench.report import phases
from stretto_bench.shape import Shape

READY_S, END_S = 1800.0, 20.0
PROMPT_TOKENS, COMPLETION_TOKENS = 64, 128
NUM_IDS = 40
FIRST_ID = 20
TAIL_CHARS = 2000


def bench_engine(cfg: InferenceConfig, given: Shape) -> dict[str, Any]:
    """Start an engine, and measure its tokens per second.

    Raises: ConfigError for a deployment of several engines; EngineError if it does not start or fails.
    """
    if cfg.deployment.num_processes > 1 or cfg.num_nodes > 1:
        raise ConfigError("--bench measures one engine: leave [deployment] out; N engines are N times as fast")
    prompt = given.prompt_tokens or PROMPT_TOKENS
    reply = given.completion_tokens or COMPLETION_TOKENS
    _check_length(cfg, prompt + reply)
    with _served(cfg) as (url, process):
        sampler = MemorySampler(os.getpid())
        try:
            rounds, load_s = asyncio.run(_measure(url, cfg.key, process, given, prompt, reply))
        finally:
            memory = sampler.stop()
    kept = rounds[1:]
    seconds = sum(each["time/round"] for each in kept)
    sampled = sum(each["sampled"] for each in kept)
    requests = given.requests * len(kept)
    gpus = num_gpus_of(cfg)
    return {
        "verb": "inference",
        "shape": {
            "model": cfg.model,
            "engine": cfg.engine,
            "round": f"{given.requests} requests at a time, prompts of {prompt} tokens, replies of {reply}",
            "steps": f"{given.steps} rounds, the first dropped",
        },
        "steps": len(kept),
        "rates": {
            "sampled tokens per second": sampled / seconds,
            "all tokens per second": (sampled + prompt * requests) / seconds,
            "requests per second": requests / seconds,
            "sampled tokens/s, GPU": sampled / seconds / gpus if gpus else None,
            "seconds to be ready": load_s,
        },
        "phases": phases(kept),
        "peak_memory_mib": memory,
    }


def _check_length(cfg: InferenceConfig, num_tokens: int) -> None:
    """Raises: ConfigError if the engine takes no requests of that length."""
    directory = find_config(cfg.model) if cfg.model else None
    longest = cfg.max_model_len
    if longest is None and directory is not None:
        longest = read_model_file(directory).get("max_position_embeddings")
    if isinstance(longest, int) and num_tokens > longest:
        raise ConfigError(
            f"--bench: prompt and reply have {num_tokens} tokens, and the engine takes {longest}: "
            "lower --bench.prompt-tokens or --bench.completion-tokens"
        )


def num_gpus_of(cfg: InferenceConfig) -> int:
    """GPUs of the engine that is measured; 0 if it computes on the CPU."""
    return cfg.parallel.num_gpus if visible_gpus() and cfg.device != "cpu" else 0


async def _measure(
    url: str, key: str | None, process: subprocess.Popen[bytes], given: Shape, prompt: int, reply: int
) -> tuple[list[dict[str, float]], float]:
    start = time.perf_counter()
    async with EngineClient([url], api_key=key, timeout_s=READY_S) as client:
        ready = asyncio.create_task(client.wait_ready(READY_S))
        while not ready.done():
            await asyncio.wait([ready], timeout=0.2)
            if process.poll() is not None:
                ready.cancel()
                raise EngineError(f"the engine ended with {process.returncode} before it was ready")
        await ready
        load_s = time.perf_counter() - start
        rng = np.random.default_rng(0)
        rounds = [await _round(client, rng, step, given.requests, prompt, reply) for step in range(given.steps)]
    return rounds, load_s


async def _round(
    client: EngineClient, rng: np.random.Generator, step: int, num: int, prompt: int, reply: int
) -> dict[str, float]:
    """Send all requests of a round at once; all prompts differ, so that the prefix cache does not help."""

    async def send(index: int) -> tuple[float, list[Completion]]:
        ids = rng.integers(FIRST_ID, FIRST_ID + NUM_IDS, prompt).astype(np.int32)
        sampling = SamplingParams(max_tokens=reply, ignore_eos=True, seed=step * num + index)
        request = GenerateRequest(request_id=f"bench-{step}-{index}", prompt_ids=ids, sampling=sampling)
        start = time.perf_counter()
        found = await client.generate(request)
        return time.perf_counter() - start, found

    start = time.perf_counter()
    answers = await asyncio.gather(*(send(index) for index in range(num)))
    took = sorted(time_s for time_s, _ in answers)
    sampled = sum(len(each.token_ids) for _, found in answers for each in found)
    return {
        "time/round": time.perf_counter() - start,
        "time/request_median": took[len(took) // 2],
        "time/request_p95": took[int(0.95 * (len(took) - 1))],
        "sampled": float(sampled),
    }


@contextlib.contextmanager
def _served(cfg: InferenceConfig) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run an engine on a free port within the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        data = dump(cfg)
        data["server"] |= {"host": "127.0.0.1", "port": port}
        data |= {"output_dir": folder, "run": {"name": "bench"}}
        file, log = Path(folder) / "inference.json", Path(folder) / "engine.log"
        write_json(file, data)
        argv = bound([sys.executable, "-m", "stretto", "inference", "@", str(file)])
        with log.open("wb") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}", process
        except EngineError as error:
            raise EngineError(f"{error}\n{log.read_text(errors='replace')[-TAIL_CHARS:]}") from error
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
