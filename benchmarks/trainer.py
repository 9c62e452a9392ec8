"""The trainer alone: tokens per second and memory, against a plain transformers loop, and what each knob costs.

    python benchmarks/trainer.py [--quick] [--device cuda] [--part loop|head|knobs|gemm|profile] [--family dense|moe]
                                 [--knob NAME] [--rounds N]

loop: supervised steps on the same random model and the same documents, padded micro batches of a transformers
loop beside packed ones, in turns; tokens are real tokens, without padding. head: log-probabilities of a large
vocabulary, ours beside logits kept whole. knobs: one setting changed at a time; `saved` is what the forward pass
keeps for the backward pass. gemm (CUDA): products in 8 bits beside bfloat16. profile (CUDA): for how much of a step
the GPU computes, and what.

Every measurement is a process of its own. Memory is the peak during steps over what the weights take: resident
set on a CPU, allocated memory on CUDA. Time is wall time on CUDA, and the processor time of one thread on a CPU,
steadier on a busy machine. MFU counts 6 operations for each weight that a token meets and the causal
half of attention, where the GPU's peak is known. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F

from stretto.base.runtime import keep_freed_memory
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, MuonOptim, SgdOptim
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.lm_head import token_logprobs
from stretto.records.sample import MicroBatch
from stretto.trainer.learner import Learner

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16, by what the GPU's name contains."""

DENSE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4}
MOE = {
    "family": "qwen3_moe", "hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
}  # fmt: skip
SHAPES = {
    "quick dense": DENSE | {"num_layers": 2, "hidden_size": 128, "head_dim": 16, "vocab": 2048},
    "quick moe": MOE | {"num_layers": 2, "hidden_size": 128, "head_dim": 16, "vocab": 2048},
    "dense": DENSE | {"head_dim": 32, "vocab": 4096},
    "moe": MOE | {"head_dim": 32, "vocab": 4096},
    "cuda dense": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8,
        "head_dim": 128, "vocab": 151_936,
    },
    "cuda moe": {
        "family": "qwen3_moe", "hidden_size": 2048, "num_layers": 8, "num_heads": 32, "num_kv_heads": 4,
        "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab": 151_936,
    },
}  # fmt: skip
"""Shapes of random models; the `cuda` ones are like Qwen3-0.6B and like eight layers of a 30B mixture."""

HALF = {"dtype": "bfloat16"}
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ac": {"ac": {}},
    "ac, freq 2": {"ac": {"freq": 2}},
    "ac, norm": {"ac": {"mode": "selective", "targets": ["norm"]}},
    "ac, attn_proj": {"ac": {"mode": "selective", "targets": ["attn_proj"]}},
    "ac, mlp": {"ac": {"mode": "selective", "targets": ["mlp"]}},
    "compile": {"compile": {}},
    "bfloat16": HALF,
    "bfloat16, ac": HALF | {"ac": {}},
    "sgd": {"optim": "sgd"},
    "muon": {"optim": "muon"},
    "fp8 = reference": {"fp8": "reference"},
}
MOE_KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ac": {"ac": {}},
    "ac, routed_experts": {"ac": {"mode": "selective", "targets": ["routed_experts"]}},
    "a loop over experts": {"moe_use_grouped_mm": False},
    "muon": {"optim": "muon"},
}
CUDA_KNOBS: dict[str, dict[str, Any]] = {
    "ac, offloaded": HALF | {"ac_offloading": {}},
    "optim_cpu_offload": HALF | {"optim_cpu_offload": True},
    "fp8": HALF | {"fp8": True},
    "fp8, ac": HALF | {"fp8": True, "ac": {}},
}
OPTIMS = {"adamw": AdamWOptim, "sgd": SgdOptim, "muon": MuonOptim}


# -- the work --


def shape_of(name: str) -> tuple[ScratchSection, int]:
    shape = dict(SHAPES[name])
    vocab = shape.pop("vocab")
    return ScratchSection(**shape, max_position_embeddings=16_384), vocab


def lengths_of(kind: str, num_tokens: int, longest: int) -> list[int]:
    """Documents of about num_tokens tokens: all alike, or log-normal around a quarter of the longest."""
    if kind == "equal":
        return [longest // 2] * (2 * num_tokens // longest)
    rng, lengths = np.random.default_rng(0), []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.clip(rng.lognormal(np.log(longest / 4), 0.8), 16, longest)))
    return lengths


def documents(kind: str, spec: dict[str, Any], vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    lengths = lengths_of(kind, spec["tokens"], spec["longest"])
    return [rng.integers(0, vocab, length).astype(np.int32) for length in lengths]


def packed(docs: list[np.ndarray], row_tokens: int) -> list[MicroBatch]:
    """Rows of at most row_tokens tokens, filled in order of length."""
    rows: list[list[np.ndarray]] = []
    for doc in sorted(docs, key=len, reverse=True):
        row = next((r for r in rows if sum(map(len, r)) + len(doc) <= row_tokens), None)
        if row is None:
            rows.append(row := [])
        row.append(doc)
    return [_micro_batch(row) for row in rows]


def _micro_batch(docs: list[np.ndarray]) -> MicroBatch:
    token_ids, bounds = np.concatenate(docs), np.cumsum([0, *map(len, docs)]).astype(np.int32)
    weights, zeros = np.ones(len(token_ids), np.float32), np.zeros(len(token_ids), np.float32)
    weights[bounds[:-1]] = 0
    return MicroBatch(
        token_ids=token_ids, cu_seqlens=bounds, loss_mask=np.zeros(len(token_ids), bool), logprobs=zeros,
        advantages=zeros, temperatures=np.ones(len(token_ids), np.float32), ce_weights=weights,
        sample_ids=tuple(map(str, range(len(docs)))), envs=("sft",) * len(docs),
    )  # fmt: skip


# -- one measurement, in its own process --


class Memory:
    """Peak over what was held when it was made, MiB."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        gc.collect()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self._base = _status("VmRSS")

    @property
    def peak_mb(self) -> float:
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else _status("VmHWM")
        return round((peak - self._base) / 2**20, 1)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def clock(device: str) -> float:
    """Seconds: of the wall on CUDA; of this process's one thread on a CPU, which others may share."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def stretto_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """Steps of a learner on packed rows."""
    settings, device = dict(spec["settings"]), spec["device"]
    optim = OPTIMS[settings.pop("optim", "adamw")](lr=1e-4)
    section = ModelSection(**settings)
    vocab = shape_of(spec["shape"])[1]
    policy = hub.load_model(spec["model"], dtype=hub.dtype_of(section.dtype, device), device=device)
    rows = packed(documents(spec["kind"], spec, vocab), spec["row_tokens"])
    memory = Memory(device)
    learner = Learner(policy, model=section, optim=optim, scheduler=ConstantScheduler(), max_steps=None)
    times, losses = [], []
    for step in range(spec["steps"] + 1):
        start = clock(device)
        learner.forward_backward(rows)
        losses.append(learner.optim_step()["loss/mean"])
        if step:
            times.append(clock(device) - start)
    return {"times": times, "loss": losses[0], "peak_mb": memory.peak_mb, "saved_mb": saved_mb(learner, rows[0])}


def saved_mb(learner: Learner, row: MicroBatch) -> float:
    """What the forward pass of one row keeps for the backward pass, each storage once, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in learner.policy.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    device = learner.policy.output_weight.device
    ids = torch.from_numpy(row.token_ids).long().to(device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = learner.policy.hidden(ids, PackedLayout(tuple(row.cu_seqlens.tolist()), device))
    del hidden
    return round(sum(storage.nbytes() for storage in kept.values()) / 2**20, 1)


def transformers_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """The loop one writes first: micro batches of documents in order, padded on the right; mean over all tokens."""
    from transformers import AutoModelForCausalLM

    device, dtype = spec["device"], hub.DTYPES[spec["settings"].get("dtype", "float32")]
    vocab = shape_of(spec["shape"])[1]
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype).to(device)
    docs = documents(spec["kind"], spec, vocab)
    # As many real tokens as a packed row has.
    size = max(1, spec["row_tokens"] * len(docs) // sum(map(len, docs)))
    batches = [_padded(docs[start : start + size], device) for start in range(0, len(docs), size)]
    num_tokens = sum(len(doc) - 1 for doc in docs)
    memory = Memory(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times, losses = [], []
    for step in range(spec["steps"] + 1):
        start, total = clock(device), 0.0
        for ids, mask, labels in batches:
            out = model(
                input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, num_items_in_batch=num_tokens
            )
            out.loss.backward()
            total += float(out.loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step:
            times.append(clock(device) - start)
    return {"times": times, "loss": losses[0], "peak_mb": memory.peak_mb}


def _padded(docs: list[np.ndarray], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(docs), max(map(len, docs)), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, doc in enumerate(docs):
        ids[row, : len(doc)] = labels[row, : len(doc)] = torch.from_numpy(doc).long()
        mask[row, : len(doc)] = 1
    return ids.to(device), mask.to(device), labels.to(device)


def head(spec: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of one row's tokens and their gradients."""
    tokens, dim, vocab, device = spec["tokens"], spec["dim"], spec["vocab"], spec["device"]
    generator = torch.Generator().manual_seed(0)
    dtype = hub.DTYPES[spec["dtype"]]
    hidden = torch.randn(tokens, dim, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=generator) / dim**0.5).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    memory, times = Memory(device), []
    for _ in range(4 if device == "cuda" else 1):  # a GPU's first products load their kernels
        start = clock(device)
        hidden.grad = weight.grad = None
        if spec["how"] == "naive":
            logprobs = F.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)
        else:
            logprobs, _ = token_logprobs(hidden, weight, targets, torch.ones(tokens, device=device), spec["chunk"])
        logprobs.sum().backward()
        total = float(logprobs.detach().sum())
        times.append(clock(device) - start)
    return {"times": times, "loss": total, "peak_mb": memory.peak_mb}


def gemm(spec: dict[str, Any]) -> dict[str, Any]:
    """TFLOP/s of one product: bfloat16, 8 bits, and 8 bits with the rounding of both operands."""
    from stretto.models.fp8.reference import RowGroups
    from stretto_triton.fp8 import find_kernels

    rows, dim, out = spec["gemm"]
    device = torch.device("cuda")
    x, weight = (torch.randn(n, dim, device=device, dtype=torch.bfloat16) for n in (rows, out))
    kernels, groups = find_kernels(device), RowGroups.one(rows, device)
    x8, w8 = kernels.quantize_rows(x), kernels.quantize_blocks(weight[None])
    ways = {
        "bf16": lambda: x @ weight.T,
        "fp8": lambda: kernels.product(x8, w8, groups, torch.bfloat16),
        "fp8 with rounding": lambda: kernels.product(
            kernels.quantize_rows(x), kernels.quantize_blocks(weight[None]), groups, torch.bfloat16
        ),
    }
    found: dict[str, Any] = {"kernels": kernels.name}
    for name, run in ways.items():
        for _ in range(5):
            run()
        start = clock("cuda")
        for _ in range(20):
            run()
        found[f"{name} TFLOP/s"] = round(2 * rows * dim * out * 20 / (clock("cuda") - start) / 1e12, 1)
    return found


def profiled(spec: dict[str, Any]) -> dict[str, Any]:
    """Wall time of a step on a GPU, the time for which its kernels run, and how many it starts."""
    from torch.profiler import ProfilerActivity, profile

    vocab = shape_of(spec["shape"])[1]
    policy = hub.load_model(spec["model"], dtype=torch.bfloat16, device="cuda")
    rows, section = packed(documents(spec["kind"], spec, vocab), spec["row_tokens"]), ModelSection(**spec["settings"])
    optim, scheduler = AdamWOptim(lr=1e-4), ConstantScheduler()
    learner = Learner(policy, model=section, optim=optim, scheduler=scheduler, max_steps=None)

    def step() -> float:
        start = clock("cuda")
        learner.forward_backward(rows)
        learner.optim_step()
        return clock("cuda") - start

    times = [step() for _ in range(spec["steps"] + 2)][2:]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
    kernels = profiler.key_averages()
    return {
        "step_ms": round(1e3 * statistics.median(times), 1),
        "kernels_ms": round(sum(event.self_device_time_total for event in kernels) / 1e3, 1),
        "longest": {event.key[:60]: round(event.self_device_time_total / 1e3, 1) for event in _longest(kernels)},
    }


def _longest(kernels: Any) -> list[Any]:
    return sorted(kernels, key=lambda event: -event.self_device_time_total)[:12]


WORKERS = {
    "stretto": stretto_steps, "transformers": transformers_steps, "head": head, "gemm": gemm, "profile": profiled,
}  # fmt: skip


def measured(what: str, **spec: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", what, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} {spec}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- tables --


def flops_of(shape: ScratchSection, vocab: int, lengths: list[int]) -> float:
    """Operations of one step's forward and backward passes, without what is computed again."""
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    if shape.family == "qwen3_moe":
        mlp = 3 * shape.hidden_size * shape.moe_intermediate_size * shape.num_experts_per_tok
    weights = shape.num_layers * (attention + mlp) + vocab * shape.hidden_size
    pairs = sum(length * length / 2 for length in lengths)
    return 6 * weights * sum(lengths) + 12 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def rate(times: list[float], flops: float, num_tokens: int, device: str) -> dict[str, float]:
    step_s = statistics.median(times)
    found = {"tokens_per_s": round(num_tokens / step_s), "tflops": round(flops / step_s / 1e12, 4)}
    if device == "cuda":
        name = torch.cuda.get_device_name()
        peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
        if peak is not None:
            found["mfu"] = round(found["tflops"] / peak, 4)
    return found


class Bench:
    """The sizes of a run, and where its models are."""

    def __init__(self, args: argparse.Namespace, models: Path) -> None:
        self.device, self.quick = args.device, args.quick
        lead = "quick " if args.quick else "cuda " if args.device == "cuda" else ""
        self.shapes = {family: f"{lead}{family}" for family in args.family or ("dense", "moe")}
        self.steps, self.rounds = (2, 1) if args.quick else (3, args.rounds or 2)
        self.knob_names = args.knob
        self.sizes = {"tokens": 2048, "longest": 256, "row_tokens": 1024}
        if args.quick:
            self.sizes = {"tokens": 512, "longest": 128, "row_tokens": 256}
        elif args.device == "cuda":
            self.sizes = {"tokens": 32_768, "longest": 4096, "row_tokens": 8192}
        self.settings = HALF if args.device == "cuda" else {}
        self.models = models
        for name in self.shapes.values():
            scratch, vocab = shape_of(name)
            policy = hub.random_model(scratch, vocab, eos_token_id=0)
            hub.save_hf(policy, models / name)

    def run(self, what: str, shape: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
        return measured(
            what, shape=shape, model=str(self.models / shape), kind=kind, settings=settings, device=self.device,
            steps=self.steps, **self.sizes,
        )  # fmt: skip

    def loop(self) -> dict[str, Any]:
        """Both loops in turns."""
        found: dict[str, Any] = {}
        for family, shape in self.shapes.items():
            for kind in ("mixed",) if self.quick else ("mixed", "equal"):
                scratch, vocab = shape_of(shape)
                lengths = lengths_of(kind, self.sizes["tokens"], self.sizes["longest"])
                flops = flops_of(scratch, vocab, lengths)
                runs: dict[str, list[dict[str, Any]]] = {"stretto": [], "transformers": []}
                for _ in range(self.rounds):
                    for who, done in runs.items():
                        done.append(self.run(who, shape, kind, self.settings))
                losses = [runs[who][0]["loss"] for who in runs]
                assert abs(losses[0] - losses[1]) < 1e-3 * losses[1], f"not the same work: {losses}"
                entry: dict[str, Any] = {}
                for who, done in runs.items():
                    times = [seconds for one in done for seconds in one["times"]]
                    entry[who] = rate(times, flops, sum(lengths), self.device)
                    entry[who]["peak_mb"] = min(one["peak_mb"] for one in done)
                ours, theirs = entry["stretto"], entry["transformers"]
                entry["ratio_tokens_per_s"] = round(ours["tokens_per_s"] / theirs["tokens_per_s"], 2)
                entry["ratio_memory"] = round(ours["peak_mb"] / theirs["peak_mb"], 2)
                found[f"{family}, {kind} lengths"] = entry
                print(f"{family}, {kind} lengths: {entry}", flush=True)
        return found

    def head(self) -> dict[str, Any]:
        spec = {"tokens": 2048, "dim": 512, "vocab": 50_304, "chunk": 256, "dtype": "float32"}
        if self.quick:
            spec |= {"tokens": 512, "dim": 128}
        elif self.device == "cuda":
            spec |= {"tokens": 16_384, "dim": 2048, "vocab": 151_936, "chunk": 2048, "dtype": "bfloat16"}
        found: dict[str, Any] = {"shape": spec}
        for how in ("naive", "chunked"):
            run = measured("head", how=how, device=self.device, **spec)
            found[how] = {"peak_mb": run["peak_mb"], "s": round(min(run["times"]), 3)}
        found["ratio_memory"] = round(found["naive"]["peak_mb"] / found["chunked"]["peak_mb"], 2)
        print(f"head: {found}", flush=True)
        return found

    def knobs(self) -> dict[str, Any]:
        """One setting at a time; `time` is over the plain run's."""
        found: dict[str, Any] = {}
        base = KNOBS | (CUDA_KNOBS if self.device == "cuda" else {})
        for family in self.shapes:
            knobs = base if family == "dense" else MOE_KNOBS
            if chosen := ["ac"] if self.quick else self.knob_names:
                knobs = {name: knobs[name] for name in ("plain", *chosen)}
            plain = 0.0
            for name, settings in knobs.items():
                run = self.run("stretto", self.shapes[family], "mixed", self.settings | settings)
                step_s = statistics.median(run["times"])
                plain = plain or step_s
                found[f"{family}: {name}"] = entry = {
                    "step_ms": round(step_s * 1e3, 1),
                    "time": round(step_s / plain, 2),
                    "saved_mb": run["saved_mb"],
                    "peak_mb": run["peak_mb"],
                }
                print(f"{family}: {name}: {entry}", flush=True)
        return found

    def profile(self) -> dict[str, Any]:
        """One step on a GPU, plain."""
        return {family: self.run("profile", shape, "mixed", self.settings) for family, shape in self.shapes.items()}

    def gemm(self) -> dict[str, Any]:
        shapes = [(8192, 4096, 4096), (16384, 2048, 6144), (16384, 7168, 2048)]
        return {"x".join(map(str, shape)): measured("gemm", gemm=shape) for shape in shapes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("loop", "head", "knobs", "gemm", "profile"), action="append")
    parser.add_argument("--family", choices=("dense", "moe"), action="append", help="of models; both")
    parser.add_argument("--knob", action="append", help="the part knobs with these, beside plain; all")
    parser.add_argument("--rounds", type=int, help="processes for each side of the part loop; 2")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if args.worker is not None:
        keep_freed_memory()
        what, spec = args.worker
        print(json.dumps(WORKERS[what](json.loads(spec))))
        return
    parts = args.part or ["loop", "head", "knobs", *(["gemm", "profile"] if args.device == "cuda" else [])]
    figures: dict[str, Any] = {"torch": torch.__version__, "device": args.device}
    if args.device == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for part in parts:
            figures[part] = getattr(bench, part)()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
