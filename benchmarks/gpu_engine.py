"""The embedded engine on a GPU against transformers' `generate`: a random model shaped like Qwen3-0.6B, bfloat16.

    python benchmarks/gpu_engine.py [--quick] [--rounds N] [--profile]

Batches of 1, 64 and 256 prompts of 128 tokens, 256 new tokens each, drawn at temperature 1. Both take turns on the same
model and prompts; figures are medians of N (5), tokens per second of the whole call, reading the prompts included.
With --profile also what a step of decoding takes, and for how much of it the GPU computes.
Without a GPU, and with --quick, a small model on what there is: to see that it runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.config.sections.model import ScratchSection
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.hub import random_model, save_hf
from stretto.records.generate import GenerateRequest, SamplingParams

LIKE_06B = ScratchSection(
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
)
VOCAB = 151_936
SMALL = ScratchSection(hidden_size=64, num_layers=2)


def seconds(call: Callable[[], object]) -> float:
    """Wall time, everything on the GPU done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ours(core: EngineCore, name: str, ids: np.ndarray, max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    for i, row in enumerate(ids):
        core.submit(core.build_request(GenerateRequest(request_id=f"{name}-{i}", prompt_ids=row, sampling=sampling)))
    while core.has_work:
        core.step()


def theirs(model: torch.nn.Module, ids: np.ndarray, max_tokens: int, device: str) -> None:
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    with torch.inference_mode():
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, pad_token_id=0,
        )  # fmt: skip


def decode_ms(core: EngineCore, ids: np.ndarray, steps: int = 20) -> dict[str, float]:
    """Wall time of a step of decoding all rows, without a profiler, and the time for which its kernels run."""
    from torch.profiler import ProfilerActivity, profile

    sampling = SamplingParams(max_tokens=4 * steps, ignore_eos=True, seed=0)
    for i, row in enumerate(ids):
        core.submit(core.build_request(GenerateRequest(request_id=f"p{i}", prompt_ids=row, sampling=sampling)))
    while core.slots.num_tokens[: len(ids)].min() < ids.shape[1] + steps:  # all prompts are read
        core.step()
    found = {"step_ms": round(seconds(lambda: [core.step() for _ in range(steps)]) / steps * 1e3, 2)}
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds(lambda: [core.step() for _ in range(steps)])
        kernels_us = sum(event.self_device_time_total for event in profiler.key_averages())
        found["kernels_ms"] = round(kernels_us / steps / 1e3, 2)
    core.abort()
    return found


def compare(
    scratch: ScratchSection,
    vocab: int,
    shape: tuple[int, int],
    batches: tuple[int, ...],
    rounds: int,
    is_profiled: bool = False,
) -> dict[str, float]:
    """Tokens per second of both by batch; shape: tokens of a prompt, new tokens."""
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = random_model(scratch, vocab).to(device=device, dtype=dtype)
    with tempfile.TemporaryDirectory() as directory:
        save_hf(model, directory)
        other = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    prompt, new = shape
    settings = CoreSettings(enable_prefix_caching=False, gpu_memory_utilization=0.5)
    core = EngineCore(model, settings)
    found: dict[str, float] = {}
    for batch in batches:
        taken: dict[str, list[float]] = {"embedded": [], "transformers": []}
        for i in range(rounds + 1):
            ids = np.random.default_rng(i).integers(2, vocab, (batch, prompt)).astype(np.int32)
            name = f"{batch}-{i}"
            taken["embedded"].append(seconds(lambda ids=ids, name=name: ours(core, name, ids, new)))
            taken["transformers"].append(seconds(lambda ids=ids: theirs(other, ids, new, device)))
        for name, times in taken.items():
            found[f"{name}_{batch}_tokens_per_s"] = round(batch * new / statistics.median(times[1:]))
        if is_profiled:
            ids = np.random.default_rng(rounds + 1).integers(2, vocab, (batch, prompt)).astype(np.int32)
            found |= {f"decode_{batch}_{name}": ms for name, ms in decode_ms(core, ids).items()}
        print(f"batch {batch}: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, few tokens")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each side that are timed")
    parser.add_argument("--profile", action="store_true", help="also time steps of decoding and their kernels")
    args = parser.parse_args()
    is_small = args.quick or not torch.cuda.is_available()
    if is_small:
        found = compare(SMALL, 64, (16, 16), (1, 8), rounds=2, is_profiled=args.profile)
    else:
        found = compare(LIKE_06B, VOCAB, (128, 256), (1, 64, 256), rounds=args.rounds, is_profiled=args.profile)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"device": device, "model": "small" if is_small else "0.6B", **found}))


if __name__ == "__main__":
    main()
