"""Samples that begin alike: tokens per second of a training step by `model.shared_prefixes`, and equal results.

    python benchmarks/shared_prefixes.py [--quick] [--shape NAME] [--rounds N]

turns: groups of 8 samples of 4 turns, an observation and a reply each, that part after the first, second and third
turn; 60 % of all tokens repeat what another sample of the group begins with, and the replies in them are trained in
each sample. common: the same samples with one beginning for all 8, 60 % of each sample. prompts: groups of 8 with a
long prompt and short replies; short: a short one and short replies; little: a short one and long replies. long: as
prompts with documents beyond those of the kernels in C.

The orchestrator packs the samples as it does for each setting, and a learner of each trains on them, step by step in
turns in one process. Time is the processor time of one thread; tokens are all tokens of all samples, computed or not.
`error` is the largest difference of a gradient of the first step from that of samples computed one by one, over the
largest gradient. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.base.runtime import keep_freed_memory
from stretto.config.sections.model import ModelSection, ScratchSection, SharedPrefixes
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.orchestrator.batch import pack
from stretto.records.row_packing import PrefixTree
from stretto.records.sample import MicroBatch, TrainSample
from stretto.trainer.learner import Learner

MODES: tuple[SharedPrefixes, ...] = ("off", "prompts", "tree")
GROUP = 8
SHAPES: dict[str, dict[str, Any]] = {
    # widths: how many branches each turn has; tokens: how many a turn has, 20 % more or less
    "turns": {"widths": (1, 2, 2, 8), "tokens": (110, 100, 100, 100), "row_tokens": 2048},
    "common": {"widths": (1, 8), "tokens": (246, 164), "row_tokens": 2048},
    "prompts": {"widths": (1, 8), "tokens": (440, 48), "row_tokens": 2048, "has_prompt": True},
    "short": {"widths": (1, 8), "tokens": (26, 24), "row_tokens": 2048, "has_prompt": True},
    "little": {"widths": (1, 8), "tokens": (20, 180), "row_tokens": 2048, "has_prompt": True},
    "long": {"widths": (1, 8), "tokens": (1536, 64), "row_tokens": 4096, "has_prompt": True},
}
MODEL = {"num_heads": 8, "num_kv_heads": 4, "max_position_embeddings": 4096}
SIZES = {
    "full": MODEL | {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8, "head_dim": 32},
    "quick": MODEL | {"hidden_size": 128, "intermediate_size": 512, "num_layers": 2, "head_dim": 16},
}
VOCAB = {"full": 4096, "quick": 2048}


def group(number: int, shape: dict[str, Any], vocab: int) -> list[TrainSample]:
    """The samples of one group: every branch of the last turn with the branches that it continues."""
    rng = np.random.default_rng(number)
    found = []
    turns = [
        [rng.integers(0, vocab, int(tokens * rng.uniform(0.8, 1.2))).astype(np.int32) for _ in range(width)]
        for width, tokens in zip(shape["widths"], shape["tokens"])
    ]
    for member in range(GROUP):
        parts = [branches[member * len(branches) // GROUP] for branches in turns]
        ids = np.concatenate(parts)
        replies = [np.arange(len(part)) >= len(part) // 2 for part in parts]
        if shape.get("has_prompt"):
            replies = [np.full(len(part), place > 0) for place, part in enumerate(parts)]
        mask = np.concatenate(replies)
        found.append(
            TrainSample(
                sample_id=f"g{number}.{member}/0",
                env="benchmark",
                token_ids=ids,
                loss_mask=mask,
                logprobs=np.where(mask, np.float32(-np.log(vocab)), 0).astype(np.float32),
                advantages=np.where(mask, np.float32(rng.standard_normal()), 0).astype(np.float32),
            )
        )
    return found


def rows_of(samples: list[TrainSample], shape: dict[str, Any], mode: SharedPrefixes) -> list[MicroBatch]:
    work = pack(samples, step=1, seq_len=shape["row_tokens"], shares_prefixes=mode == "tree")
    while True:
        try:
            next(work)
        except StopIteration as end:
            return list(end.value[0].micro_batches)


def measure(name: str, size: str, rounds: int, num_groups: int) -> dict[str, Any]:
    """Steps of a learner per setting, in turns."""
    shape, vocab = SHAPES[name], VOCAB[size]
    samples = [sample for number in range(num_groups) for sample in group(number, shape, vocab)]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    num_left = PrefixTree.of([[sample.token_ids] for sample in samples]).num_tokens
    learners, rows = {}, {}
    for mode in MODES:
        policy = hub.random_model(ScratchSection(**SIZES[size]), vocab, eos_token_id=1)
        learners[mode] = Learner(
            policy,
            model=ModelSection(dtype="float32", shared_prefixes=mode),
            optim=AdamWOptim(lr=1e-4),
            scheduler=ConstantScheduler(),
            max_steps=None,
        )
        rows[mode] = rows_of(samples, shape, mode)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    first: dict[str, list[torch.Tensor]] = {}
    for step in range(rounds + 1):
        for mode in MODES if step % 2 else MODES[::-1]:
            start = time.process_time()
            learners[mode].forward_backward(rows[mode])
            if not step:
                first[mode] = [p.grad.clone() for p in learners[mode].policy.parameters() if p.grad is not None]
            learners[mode].optim_step()
            if step:
                times[mode].append(time.process_time() - start)
    largest = max(float(gradient.abs().max()) for gradient in first["off"])
    errors = {
        mode: max(float((a - b).abs().max()) for a, b in zip(first[mode], first["off"], strict=True)) / largest
        for mode in MODES
    }
    assert max(errors.values()) < 1e-5, errors
    ratio = lambda mode: statistics.median(a / b for a, b in zip(times["off"], times[mode]))
    return {
        "tokens": num_tokens,
        "repeated": round(1 - num_left / num_tokens, 3),
        "rows": {mode: len(rows[mode]) for mode in MODES},
        "tokens_per_s": {mode: round(num_tokens / statistics.median(times[mode])) for mode in MODES},
        "ratio": {mode: round(ratio(mode), 2) for mode in MODES if mode != "off"},
        "ratios_of_tree": [round(a / b, 2) for a, b in zip(times["off"], times["tree"])],
        "error": {mode: float(f"{error:.1e}") for mode, error in errors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, fewer groups and rounds")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, help="steps that are timed")
    args = parser.parse_args()
    keep_freed_memory()
    size = "quick" if args.quick else "full"
    found = {}
    for name in args.shape or SHAPES:
        found[name] = measure(name, size, args.rounds or (3 if args.quick else 5), 2 if args.quick else 4)
        line = found[name]
        print(f"{name}: {line['tokens']} tokens, {line['repeated']:.0%} repeated, rows {line['rows']}")
        print(f"  tokens per second {line['tokens_per_s']}, against off {line['ratio']}, errors {line['error']}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
