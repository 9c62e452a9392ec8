"""What vLLM loses of an adapter: merged into weights of bfloat16, and computed beside them.

    python benchmarks/adapter_engine.py MODEL_DIRECTORY [--norm 1e-3] [--prompts 8] [--side computed]

Each side is a vLLM in bfloat16 on this machine's CPU, which gets a random adapter of the given norm, relative to that
of each weight, as a weight update through /dev/shm. `effect`: mean change of a log-probability by the adapter in
float32. `error`: mean distance of the engine's change from that one. `kl`: mean squared distance / 2, the mismatch KL
to second order. `seconds`: the second update. `first`: the first request after it, of one token, less the next one.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch

from stretto.config.sections.model import LoRASection
from stretto.models.attention import PackedLayout
from stretto.models.hub import load_model
from stretto.models.lora import Adapter, attach_adapters
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.shm import ShmPublisher

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoRASection(rank=16, alpha=32.0, target_modules=TARGETS)


def adapt(model: torch.nn.Module, norm: float) -> Adapter:
    """Attach random adapters, each with this norm relative to its weight."""
    weights = dict(model.named_parameters())
    attach_adapters(model, LORA)
    adapter, generator = Adapter.of(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, (a, b) in adapter.pairs.items():
            b.normal_(0, 1, generator=generator)
            b.mul_(norm * weights[name].float().norm() / (adapter.scaling * (b @ a).norm()))
    return adapter


def scores(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    with torch.no_grad():
        hidden = model.hidden(tokens, PackedLayout((0, len(tokens)), tokens.device))
        logits = (hidden @ model.output_weight.T).float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()


async def measure(model: Path, prompts: list[np.ndarray], adapter: Adapter, *flags: str) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", str(model), "--server.port", str(port), "--engine", "vllm", "--dtype", "bfloat16"]
    with tempfile.TemporaryDirectory() as out:
        words += ["--device", "cpu", "--max-model-len", "512", "--output-dir", out, *flags]
        log = (Path(out) / "log").open("wb")
        child = subprocess.Popen([sys.executable, "-m", "stretto", "inference", *words], stdout=log, stderr=log)
        publisher = ShmPublisher(f"adapter-engine-{port}")
        try:
            async with EngineClient([f"http://127.0.0.1:{port}"], timeout_s=120) as client:
                await client.wait_ready(300)
                read = lambda label: read_scores(client, prompts, label)
                base = await read("base")
                info = AdapterInfo(LORA.rank, adapter.scaling)
                for version in (1, 2):
                    manifest = publisher.publish(version, adapter.tensors())
                    started = time.perf_counter()
                    await client.update_weights(msgspec.structs.replace(manifest, adapter=info))
                    seconds = time.perf_counter() - started
                first, second = [await seconds_of(client, prompts[0][:8], f"after-{number}") for number in (1, 2)]
                adapted = await read("adapted")
                return {"base": base, "adapted": adapted, "seconds": seconds, "first": first - second}
        finally:
            publisher.close()
            child.terminate()
            child.wait(60)


async def seconds_of(client: EngineClient, ids: np.ndarray, name: str) -> float:
    sampling = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
    started = time.perf_counter()
    await client.generate(GenerateRequest(request_id=name, prompt_ids=ids, sampling=sampling, cache_salt=name))
    return time.perf_counter() - started


async def read_scores(client: EngineClient, prompts: list[np.ndarray], label: str) -> np.ndarray:
    found = []
    for number, ids in enumerate(prompts):
        [canary] = (await client.score_canary(ids, f"{label}-{number}")).values()
        found.append(canary.prompt[1:])  # the first token has no log-probability
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--norm", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--side", choices=["merged", "computed"], help="only this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(100, 40_000, 96).astype(np.int32) for _ in range(args.prompts)]
    policy = load_model(args.model, dtype=torch.float32)
    base = np.concatenate([scores(policy, ids) for ids in prompts])
    adapter = adapt(policy, args.norm)
    effect = np.concatenate([scores(policy, ids) for ids in prompts]) - base
    result = {"effect": float(np.abs(effect).mean()), "norm": args.norm}
    computed = ("--policy-lora.rank", str(LORA.rank), "--policy-lora.alpha", str(LORA.alpha))
    for side, flags in (("merged", ()), ("computed", computed)):
        if args.side not in (None, side):
            continue
        found = asyncio.run(measure(args.model, prompts, adapter, *flags))
        change = found["adapted"] - found["base"]
        result[side] = {
            "error": float(np.abs(change - effect).mean()),
            "kl": float(((found["adapted"] - base - effect) ** 2).mean() / 2),
            "kl_of_base": float(((found["base"] - base) ** 2).mean() / 2),
            "correlation": float(np.corrcoef(change, effect)[0, 1]),
            "seconds": found["seconds"],
            "first": found["first"],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
