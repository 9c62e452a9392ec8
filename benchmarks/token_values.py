"""What a step of the trainer costs more because it keeps the values of its trained tokens (RUN/token_values).

    python benchmarks/token_values.py [--samples 64] [--tokens 128] [--rounds 40]

Two random Qwen3 (2 layers, hidden 64) are trained on the same packed batch, one with these files and one without, step
by step in turns. Processor time counts, of all threads, so that work beside the step is counted too. The last line is
one JSON object: median seconds of a step of each, the median of the ratios, and bytes on disk per trained token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.records.sample import MicroBatch
from stretto.records.trained_tokens import step_sizes
from stretto.trainer.batch.token_values import TokenValues
from stretto.trainer.learner import Learner

VOCAB, PROMPT = 64, 32


def build() -> Learner:
    torch.manual_seed(0)
    shape = ScratchSection(hidden_size=64, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2)
    scheduler = ConstantScheduler(warmup_steps=0)
    model = ModelSection(dtype="float32", optimization_dtype="float32")
    policy = hub.random_model(shape, VOCAB, eos_token_id=0)
    return Learner(policy, model=model, optim=AdamWOptim(lr=1e-4), scheduler=scheduler, max_steps=None)


def micro_batch(num_samples: int, num_tokens: int) -> MicroBatch:
    rng = np.random.default_rng(0)
    total = num_samples * (PROMPT + num_tokens)
    is_reply = np.tile(np.arange(PROMPT + num_tokens) >= PROMPT, num_samples)
    return MicroBatch(
        token_ids=rng.integers(1, VOCAB, total).astype(np.int32),
        cu_seqlens=np.arange(0, total + 1, PROMPT + num_tokens, dtype=np.int32),
        loss_mask=is_reply,
        logprobs=np.full(total, -np.log(VOCAB), np.float32),
        advantages=np.repeat(rng.normal(size=num_samples), PROMPT + num_tokens).astype(np.float32),
        temperatures=np.ones(total, np.float32),
        sample_ids=tuple(f"g{number // 8}.{number % 8}/0" for number in range(num_samples)),
        envs=("e",) * num_samples,
    )


def seconds(learner: Learner, mb: MicroBatch, values: TokenValues | None) -> float:
    began = time.process_time()
    learner.forward_backward([mb])
    learner.optim_step()
    if values is not None:
        values.end_step(learner.step)
        values.wait()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="what keeping the values of trained tokens costs")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    mb, plain, keeping = micro_batch(given.samples, given.tokens), build(), build()
    with tempfile.TemporaryDirectory(prefix="stretto-values-") as name:
        values = TokenValues(Path(name), 10**9)
        keeping.observers.append(values.add)
        pairs = [(seconds(plain, mb, None), seconds(keeping, mb, values)) for _ in range(given.rounds + 3)][3:]
        values.close()
        num_bytes = statistics.median(step_sizes(Path(name)).values()) / int(mb.loss_mask.sum())
    without, having = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(b / a for a, b in pairs)
    print(json.dumps({"without_s": without, "with_s": having, "ratio": ratio, "bytes_per_token": num_bytes}))


if __name__ == "__main__":
    main()
