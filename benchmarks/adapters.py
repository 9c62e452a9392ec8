"""LoRA adapters in the embedded engine: what they cost per batch, and how large an update of one is.

    python benchmarks/adapters.py [--quick]

One thread. The same 64 requests are spread over the base model, one adapter or several, in turns in one process on the
same random Qwen3; figures are tokens per second of process time, medians of rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.base.runtime import keep_freed_memory
from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.hub import export_tensors, random_model
from stretto.models.lora import Adapter, attach_adapters
from stretto.records.generate import GenerateRequest, SamplingParams

VOCAB = 112
SHAPE = ScratchSection(hidden_size=256, intermediate_size=768, num_layers=4, max_position_embeddings=512)
LORA = LoRASection(rank=16, alpha=32.0)
PROMPT_TOKENS = 32
SETTINGS = {"base": 0, "one_adapter": 1, "four_adapters": 4, "sixteen_adapters": 16}


def adapter(seed: int) -> Adapter:
    model = random_model(SHAPE, VOCAB)
    attach_adapters(model, LORA, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.02)
    return Adapter.of(model)


def build(num_adapters: int) -> EngineCore:
    core = EngineCore(random_model(SHAPE, VOCAB), CoreSettings(kv_cache_tokens=16_384))
    for index in range(num_adapters):
        core.load_adapter(str(index), adapter(index))
    return core


def tokens_per_s(core: EngineCore, num_adapters: int, num_requests: int, num_tokens: int, label: str) -> float:
    """Requests take the adapters in turns; tokens sampled per second of process time."""
    rng = np.random.default_rng(0)
    start = time.process_time()
    for index in range(num_requests):
        name = str(index % num_adapters) if num_adapters else None
        asked = GenerateRequest(
            request_id=f"{label} {index}",
            prompt_ids=rng.integers(2, VOCAB, PROMPT_TOKENS).astype(np.int32),
            sampling=SamplingParams(max_tokens=num_tokens, seed=index, ignore_eos=True),
            cache_salt=label,
            adapter=name,
        )
        core.submit(core.build_request(asked))
    while core.has_work:
        core.step()
    return num_requests * num_tokens / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    keep_freed_memory()
    num_requests, num_tokens, rounds = (16, 16, 2) if quick else (64, 64, 5)
    cores = {name: build(count) for name, count in SETTINGS.items()}
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, count in SETTINGS.items():
            rate = tokens_per_s(cores[name], count, num_requests, num_tokens, f"{round_}")
            if round_:
                found[name].append(rate)
    rates = {name: round(statistics.median(values)) for name, values in found.items()}
    one = adapter(0)
    start = time.perf_counter()
    cores["one_adapter"].load_adapter("0", one)
    replaced_s = time.perf_counter() - start
    whole = sum(tensor.nbytes for _, tensor in export_tensors(random_model(SHAPE, VOCAB)))
    sent = sum(tensor.nbytes for _, tensor in one.tensors())
    figures = {
        "tokens_per_cpu_s": rates,
        "share_of_base": {name: round(rate / rates["base"], 2) for name, rate in rates.items()},
        "update_bytes": {"whole": whole, "adapter": sent},
        "replaced_in_ms": round(1e3 * replaced_s, 2),
        "requests": num_requests,
        "tokens": num_tokens,
        "rank": LORA.rank,
    }
    for key, value in figures.items():
        print(f"{key}: {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
