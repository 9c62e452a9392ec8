"""One GPU against the figures that others publish: rows of a trainer, steps of a run, the time of a weight update.

    python benchmarks/gpu.py [--out gpu.json] [--minutes 8] [--cells NAME ...] [--quick] [--anew]

Cells of `train` are those of prime-rl's own table (`benchmarks/baselines`, January 2026): two micro batches of
one row each per step, compiled blocks, all activations computed again, tokens that mean nothing, 4 steps of which the
first is not counted. Their column is the published figure of one H100 (80 GB). A random model has the shape of the
named one, because time does not depend on what weights say; its tokens are drawn. `run` cells are whole runs (`rl`):
trainer and embedded engine share the GPU; the step and the publication of a version as their metrics have them,
beside TRL's; their tokenizer is one of letters.

Each cell is a process of its own and ends in the JSON file, one object per cell. Cells that are there already are not
measured again (--anew), and none begins that would not end in time, so the command may be called until it says `done`.
--quick, and any machine without CUDA: small shapes on what there is, to see that all cells run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from trainer import Memory, clock, flops_of, rate

from stretto.base.files import write_atomic
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.models.config import scratch_config
from stretto.models.decoder import Decoder
from stretto.records.sample import MicroBatch
from stretto.trainer.learner import Learner

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28, "num_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_layers": 36, "num_heads": 32},
}
COMMON = {"num_kv_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072}
SMALL = ScratchSection(hidden_size=64, num_layers=2, max_position_embeddings=4096)
VOCAB = 151_936
QUICK_TOKENS = 256

TRAIN: dict[str, dict[str, Any]] = {
    "0.6B rl 16k": {"model": "Qwen3-0.6B", "mode": "rl", "seq_len": 16_384, "theirs": (11_896, 12.5), "takes_s": 60},
    "4B rl LoRA 16k": {
        "model": "Qwen3-4B", "mode": "rl", "rank": 16, "seq_len": 16_384, "theirs": (6_229, 23.3), "takes_s": 90,
    },
    "0.6B sft 8k": {"model": "Qwen3-0.6B", "mode": "sft", "seq_len": 8_192, "theirs": (26_005, 31.7), "takes_s": 45},
    "0.6B sft 16k": {"model": "Qwen3-0.6B", "mode": "sft", "seq_len": 16_384, "theirs": (25_486, 52.8), "takes_s": 50},
    "0.6B rl LoRA 16k": {
        "model": "Qwen3-0.6B", "mode": "rl", "rank": 16, "seq_len": 16_384, "theirs": (13_342, 5.2), "takes_s": 60,
    },
    "0.6B rl 64k": {"model": "Qwen3-0.6B", "mode": "rl", "seq_len": 65_536, "theirs": (10_147, 19.6), "takes_s": 100},
    "4B rl LoRA 64k": {
        "model": "Qwen3-4B", "mode": "rl", "rank": 16, "seq_len": 65_536, "theirs": (4_164, 42.0), "takes_s": 200,
    },
}  # fmt: skip
"""`theirs`: tokens per second and GiB. prime-rl's supervised cells keep their activations, so ours do."""
RUNS: dict[str, dict[str, Any]] = {
    "0.6B run": {"model": "Qwen3-0.6B", "takes_s": 90, "theirs": {"publish_s": 0.18}},
    "1.7B run": {"model": "Qwen3-1.7B", "takes_s": 120, "theirs": {"step_s": 0.62}},
}
"""`theirs`: TRL's update of 0.6B weights on a second H100, and its step of a 1.5B model in server mode."""


def shape_of(name: str, *, is_quick: bool) -> tuple[ScratchSection, int]:
    """The shape of a model, and its number of tokens."""
    return (SMALL, 2048) if is_quick else (ScratchSection(**SHAPES[name], **COMMON), VOCAB)


def random_policy(shape: ScratchSection, vocab: int, device: str, *, is_quick: bool, **token_ids: int) -> Decoder:
    """A network whose weights are drawn where they are used: those of 4B take a CPU minutes."""
    policy = hub.build_model(
        scratch_config(shape, vocab, **token_ids), torch.float32 if is_quick else torch.bfloat16, device
    )
    for weights in policy.parameters():
        torch.nn.init.normal_(weights, std=0.02) if weights.ndim > 1 else torch.nn.init.ones_(weights)
    return policy


def row_of(mode: str, num_tokens: int, vocab: int, seed: int) -> MicroBatch:
    """One document of drawn tokens, all of which but the first are trained."""
    rng = np.random.default_rng(seed)
    ones, zeros = np.ones(num_tokens, np.float32), np.zeros(num_tokens, np.float32)
    is_trained = np.ones(num_tokens, bool)
    is_trained[0] = False
    is_rl = mode == "rl"
    return MicroBatch(
        token_ids=rng.integers(0, vocab, num_tokens).astype(np.int32),
        cu_seqlens=np.array([0, num_tokens], np.int32),
        loss_mask=is_trained if is_rl else ~np.ones(num_tokens, bool),
        logprobs=np.full(num_tokens, -np.log(vocab), np.float32),
        advantages=rng.normal(size=num_tokens).astype(np.float32) if is_rl else zeros,
        temperatures=ones,
        ce_weights=None if is_rl else is_trained.astype(np.float32),
        sample_ids=(str(seed),),
        envs=(mode,),
    )


def train(cell: dict[str, Any], device: str, *, is_quick: bool) -> dict[str, Any]:
    """Steps of a learner on two rows."""
    shape, vocab = shape_of(cell["model"], is_quick=is_quick)
    num_tokens = QUICK_TOKENS if is_quick else cell["seq_len"]
    section: dict[str, Any] = {} if is_quick else {"dtype": "bfloat16", "compile": {}}
    if cell["mode"] == "rl":
        section["ac"] = {}
    if rank := cell.get("rank"):
        section["lora"] = {"rank": rank}
    policy = random_policy(shape, vocab, device, is_quick=is_quick)
    rows = [row_of(cell["mode"], num_tokens, vocab, seed) for seed in (0, 1)]
    memory = Memory(device)
    learner = Learner(
        policy, model=ModelSection(**section), optim=AdamWOptim(lr=1e-6), scheduler=ConstantScheduler(), max_steps=None
    )
    times = []
    for _ in range(4):
        start = clock(device)
        learner.forward_backward(rows)
        learner.optim_step()
        times.append(clock(device) - start)
    found = rate(times[1:], flops_of(shape, vocab, [num_tokens, num_tokens]), 2 * num_tokens, device)
    return found | {"step_s": round(statistics.median(times[1:]), 3), "first_step_s": round(times[0], 1)} | {
        "gib": round(torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else memory.peak_mb / 1024, 2)
    }  # fmt: skip


def run(cell: dict[str, Any], device: str, *, is_quick: bool) -> dict[str, Any]:
    """A run of `stretto rl` on this one device: trainer and embedded engine."""
    shape = shape_of(cell["model"], is_quick=is_quick)[0]
    group, new_tokens = (8, 8) if is_quick else (64, 128)
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        model = Path(folder, "model")
        build_letters_tokenizer(model)
        tokenizer = load_tokenizer(model)
        ids = {"eos_token_id": tokenizer.eos_token_id}
        hub.save_hf(random_policy(shape, tokenizer.vocab_size, device, is_quick=is_quick, **ids), model, model)
        command = [
            sys.executable, "-m", "stretto", "rl", "--output-dir", folder, "--run.name", "run",
            "--model.name", str(model), "--max-steps", "12", "--seq-len", "512",
            "--orchestrator.env", '[{"id": "sort-letters"}]',
            "--orchestrator.batch-size", str(group), "--orchestrator.group-size", "4",
            "--orchestrator.train.sampling.max-completion-tokens", str(new_tokens),
            "--orchestrator.train.sampling.ignore-eos", "--no-orchestrator.filter-zero-advantages",
            "--inference.engine", "embedded", "--inference.device", device,
            *([] if is_quick else ["--model.dtype", "bfloat16"]),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        text = Path(folder, "run", "metrics", "trainer.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    median = lambda key: round(statistics.median([row[key] for row in rows if key in row][4:]), 4)
    return {"step_s": median("time/step"), "publish_s": median("time/publish")}


WORKERS = {"train": train, "run": run}


def measure(
    kind: str, name: str, cell: dict[str, Any], device: str, *, is_quick: bool, limit_s: float
) -> dict[str, Any]:
    """One cell in a process of its own; an error is a result, too."""
    words = [sys.executable, __file__, "--worker", kind, name, *(["--quick"] if is_quick else []), "--device", device]
    started = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, start_new_session=True, **pipes) as worker:
        try:
            out, errors = worker.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)  # its run too, whose processes end with it
            return {"error": f"it did not end in {limit_s:.0f} s"}
        except BaseException:
            os.killpg(worker.pid, signal.SIGKILL)
            raise
    if worker.returncode:
        return {"error": errors.strip()[-800:]}
    found = json.loads(out.splitlines()[-1]) | {"took_s": round(time.monotonic() - started, 1)}
    if kind == "train" and not is_quick:
        rate_of_theirs, gib = cell["theirs"]
        found["times_theirs"] = round(found["tokens_per_s"] / rate_of_theirs, 2)
        found["memory_over_theirs"] = round(found["gib"] / gib, 2)
    return found | ({"theirs": cell["theirs"]} if kind == "run" and not is_quick else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--cells", nargs="+", choices=[*TRAIN, *RUNS], help="these alone")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    is_quick, cells = args.quick or args.device == "cpu", TRAIN | RUNS
    if args.worker is not None:
        kind, name = args.worker
        print(json.dumps(WORKERS[kind](cells[name], args.device, is_quick=is_quick)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `measure` then ends its worker
    ends_at = time.monotonic() + 60 * args.minutes
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    known = json.loads(args.out.read_text()) if args.out.exists() and not args.anew else {}
    left = []
    keys = {name: f"{device}{', quick' if is_quick else ''}: {name}" for name in args.cells or cells}
    for name, key in sorted(keys.items(), key=lambda pair: pair[1] in known):  # those with an error are tried last
        if "error" not in known.get(key, {"error": "not measured"}):
            continue
        cell, seconds_left = cells[name], ends_at - time.monotonic()
        if seconds_left < (10 if is_quick else cell["takes_s"]):
            left.append(name)
            continue
        kind = "train" if name in TRAIN else "run"
        limit_s = seconds_left if is_quick else min(seconds_left, 3 * cell["takes_s"])
        known[key] = measure(kind, name, cell, args.device, is_quick=is_quick, limit_s=limit_s)
        print(f"{key}: {known[key]}", flush=True)
        write_atomic(args.out, json.dumps(known, indent=1).encode() + b"\n")  # the machine may be taken back
    print(f"left for another call: {', '.join(left)}" if left else "done")
    print(json.dumps(known))
    return 2 if left else int(any("error" in found for found in known.values()))


if __name__ == "__main__":
    sys.exit(main())
