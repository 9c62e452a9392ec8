"""The embedded engine with drafts and without: tasks with long copies, and tasks without any.

    python benchmarks/speculation.py [--quick]

copies: a 0.1M model is taught for a minute to repeat its prompt, and repeats 16 to 64 of its tokens at temperature 1.
none: a random model, whose tokens are noise; drafts must switch themselves off. groups: the model that copies, 8
samples per prompt.

One thread. All engines take turns in one process on the same requests, so many at a time, and must give the same bits;
figures are tokens per second of processor time, medians over rounds. The engine with drafts lives through all rounds of
a row, as in a run, so what it pays to find out that drafts do not help is in the figures. `control` is a second engine
without drafts: what the machine adds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from stretto.base.runtime import keep_freed_memory
from stretto.config.sections.model import ScratchSection
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.hub import random_model
from stretto.models.lm_head import head_logits
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto_speculation.speculator import SpeculationSettings

VOCAB = 64
COPIED = 64
"""Tokens of a text to repeat."""
Ask = Callable[[int], list[GenerateRequest]]


def copying_model(steps: int) -> Decoder:
    """A model that repeats its prompt: taught on random texts that are followed by themselves."""
    torch.manual_seed(0)
    model = random_model(ScratchSection(hidden_size=64, num_layers=2), VOCAB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    length = COPIED + 1
    for step in range(steps):
        rng = np.random.default_rng(step)
        rows = [np.tile(np.append(rng.integers(3, VOCAB, COPIED), 2), 2) for _ in range(24)]
        ids = torch.from_numpy(np.concatenate(rows))
        ends = np.cumsum([0, *(len(row) for row in rows)]).tolist()
        hidden = model.hidden(ids, PackedLayout(tuple(ends), ids.device))
        hidden = hidden.view(len(rows), 2 * length, -1)[:, COPIED:-1].flatten(0, 1)
        targets = ids.view(len(rows), 2 * length)[:, length:].flatten()
        loss = torch.nn.functional.cross_entropy(head_logits(hidden, model.output_weight), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"taught to copy: loss {loss.item():.3f} after {steps} steps")
    return model


def run(core: EngineCore, requests: list[GenerateRequest], at_once: int) -> tuple[float, list[bytes]]:
    """Processor seconds, and the bytes of all tokens and logprobs; a request that ends is replaced by the next."""
    built = [core.build_request(request) for request in requests]
    waiting = built[::-1]
    started = time.process_time()
    while waiting or core.has_work:
        while waiting and len(core.requests) < at_once:
            core.submit(waiting.pop())
        core.step()
    elapsed = time.process_time() - started
    completions = [completion for request in built for completion in request.results]
    return elapsed, [c.token_ids.tobytes() + c.logprobs.tobytes() for c in completions]


def compare(
    name: str, model: Decoder, ask: Ask, rounds: int, *, at_once: int, cache_tokens: int = 65_536
) -> dict[str, float]:
    """One row: both engines in turns on the same requests, `at_once` of them at a time."""
    settings = {"kv_cache_tokens": cache_tokens, "enable_prefix_caching": False}
    plain, again = (EngineCore(model, CoreSettings(**settings)) for _ in range(2))
    drafting = EngineCore(model, CoreSettings(**settings, build_drafter=SpeculationSettings().build))
    engines = {"plain": plain, "drafts": drafting, "again": again}
    for core in engines.values():
        run(core, ask(-1), at_once)
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    num_tokens = []
    for i in range(rounds):
        found = {}
        for kind, core in list(engines.items())[:: -1 if i % 2 else 1]:
            elapsed, found[kind] = run(core, ask(i), at_once)
            seconds[kind].append(elapsed)
        assert found["drafts"] == found["plain"], f"{name}, round {i}: drafts have changed tokens or logprobs"
        num_tokens.append(sum(len(x) for x in found["plain"]) / 8)
    assert drafting.drafter is not None
    counts = drafting.drafter.counts
    row = {
        "plain": round(statistics.median(n / s for n, s in zip(num_tokens, seconds["plain"])), 1),
        "drafts": round(statistics.median(n / s for n, s in zip(num_tokens, seconds["drafts"])), 1),
        "ratio": round(statistics.median(a / b for a, b in zip(seconds["plain"], seconds["drafts"])), 3),
        "ratio_of_sums": round(sum(seconds["plain"]) / sum(seconds["drafts"]), 3),
        "control": round(statistics.median(a / b for a, b in zip(seconds["plain"], seconds["again"])), 3),
        "acceptance": round(counts.num_accepted_tokens / max(counts.num_draft_tokens, 1), 3),
        "length": round(counts.num_accepted_tokens / max(counts.num_drafts, 1), 2),
        "passes_on": round(counts.num_passes_on / max(counts.num_passes, 1), 3),
    }
    print(f"{name:32}", row, flush=True)
    return row


def random_requests(count: int) -> Ask:
    """Prompts of 32 random tokens, and replies of 16 to 256."""

    def ask(seed: int) -> list[GenerateRequest]:
        rng = np.random.default_rng(seed + 1000)
        return [
            GenerateRequest(
                request_id=f"{seed} {i}",
                prompt_ids=rng.integers(3, VOCAB, 32).astype(np.int32),
                sampling=SamplingParams(max_tokens=int(rng.integers(16, 257)), ignore_eos=True, seed=seed + 1),
            )
            for i in range(count)
        ]

    return ask


def copies(count: int, n: int = 1) -> Ask:
    """Random texts of 64 tokens, of which 16 to 64 are to be repeated."""

    def ask(seed: int) -> list[GenerateRequest]:
        rng = np.random.default_rng(seed + 1000)
        found = []
        for i in range(count):
            ids = np.append(rng.integers(3, VOCAB, COPIED), 2).astype(np.int32)
            sampling = SamplingParams(max_tokens=int(rng.integers(16, COPIED + 1)), ignore_eos=True, seed=seed + 1)
            found.append(GenerateRequest(request_id=f"{seed} {i}", prompt_ids=ids, n=n, sampling=sampling))
        return found

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    out = {}
    taught = copying_model(600 if given.quick else 800)
    noise = random_model(ScratchSection(hidden_size=64, num_layers=2), VOCAB)
    rounds = 5 if given.quick else 15
    for batch in (1, 4, 16, 64):
        count = 32 if batch == 1 else 6 * batch
        for name, model, ask in (
            ("copies", taught, copies(count)),
            ("none", noise, random_requests(max(count // 3, batch))),
        ):
            row = f"{name}, {batch} at a time"
            out[row] = compare(row, model, ask, rounds, at_once=batch)
    row = "copies, groups of 8, 2 at a time"
    out[row] = compare(row, taught, copies(12, n=8), rounds, at_once=2)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
