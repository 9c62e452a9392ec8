"""Grouped matrix products against a loop over experts: forward and backward of one mixture, milliseconds.

    python benchmarks/moe.py [--quick] [--device cuda]

The same weights, tokens and choices for both, in turns; medians. `bytes` is what the expert weights take.
`engine`: the bit-exact way of the embedded engine (groups padded to 16 rows, forward only) beside the grouped
product at the row counts of decoding.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from stretto.families.shape import ModelConfig, MoEShape, Rope
from stretto.models.moe import MoE, Routing


@dataclass(frozen=True)
class Case:
    """Shape of a mixture, and tokens in one pass."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.num_experts}x{self.intermediate_size}/{self.hidden_size}, {self.num_tokens} tokens"


CPU_CASES = (Case(8, 2, 256, 512, 2048), Case(64, 4, 256, 256, 2048), Case(128, 8, 256, 64, 2048))
GPU_CASES = (Case(64, 8, 2048, 1024, 16384), Case(128, 8, 2048, 768, 16384), Case(256, 8, 4096, 1024, 8192))
QUICK_CASES = (Case(8, 2, 64, 64, 256), Case(64, 4, 64, 32, 256))


def build(case: Case, dtype: torch.dtype, device: str) -> MoE:
    shape = MoEShape(
        num_experts=case.num_experts, top_k=case.top_k, intermediate_size=case.intermediate_size,
        norm_topk_prob=True, sparse_layers=(0,),
    )  # fmt: skip
    cfg = ModelConfig(
        family="qwen3_moe", vocab_size=16, hidden_size=case.hidden_size, intermediate_size=64, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=16, rope=Rope(theta=1e4), rms_norm_eps=1e-6,
        tie_word_embeddings=True, max_position_embeddings=16, moe=shape,
    )  # fmt: skip
    torch.manual_seed(0)
    mixture = MoE(cfg)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return mixture.to(device=device, dtype=dtype)


def timed(run, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def training(case: Case, dtype: torch.dtype, device: str, rounds: int) -> dict[str, float]:
    """Forward and backward, grouped and looped."""
    mixture = build(case, dtype, device)
    x = torch.randn(case.num_tokens, case.hidden_size, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def step(use_grouped: bool) -> None:
        mixture.experts.use_grouped_mm = use_grouped
        mixture(x, 0, Routing(), None).backward(grad)

    taken: dict[bool, list[float]] = {True: [], False: []}
    for round_number in range(rounds + 1):
        for use_grouped in taken:
            mixture.zero_grad(set_to_none=True)
            elapsed = timed(lambda: step(use_grouped), device)  # noqa: B023 (called at once)
            if round_number:
                taken[use_grouped].append(elapsed)
    grouped, looped = (statistics.median(taken[kind]) for kind in (True, False))
    flops = 3 * 2 * case.num_tokens * case.top_k * 3 * case.hidden_size * case.intermediate_size
    return {
        "grouped_ms": round(grouped, 3),
        "loop_ms": round(looped, 3),
        "loop_over_grouped": round(looped / grouped, 2),
        "grouped_tflops": round(flops / grouped / 1e9, 3),
        "bytes": sum(p.numel() * p.element_size() for p in mixture.experts.parameters()),
    }


@torch.inference_mode()
def decoding(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Forward of few rows on a CPU in float32: the engine's padded groups beside the grouped product."""
    mixture = build(case, torch.float32, "cpu")
    found = {}
    for num_rows in (16, 64, 256):
        x = torch.randn(num_rows, case.hidden_size)
        taken: dict[str, list[float]] = {"padded": [], "grouped": []}
        for round_number in range(rounds + 1):
            for kind, multiple in (("padded", 16), ("grouped", None)):
                routing = Routing(row_multiple=multiple)
                elapsed = timed(lambda: mixture(x, 0, routing, None), "cpu")  # noqa: B023 (called at once)
                if round_number:
                    taken[kind].append(elapsed)
        found[f"{num_rows} rows"] = {f"{kind}_ms": round(statistics.median(times), 3) for kind, times in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cases = QUICK_CASES if args.quick else GPU_CASES if args.device == "cuda" else CPU_CASES
    dtypes = (torch.bfloat16,) if args.device == "cuda" else (torch.float32, torch.bfloat16)
    rounds = 3 if args.quick else 15
    figures: dict[str, object] = {"torch": torch.__version__, "device": args.device}
    if args.device == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for case in cases:
            figures[f"{name} {case.name}"] = found = training(case, dtype, args.device, rounds)
            print(f"{name} {case.name}: {found}")
    if args.device == "cpu":
        figures["engine"] = found = decoding(cases[0], rounds)
        print(f"engine: {found}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
