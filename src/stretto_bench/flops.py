"""Operations per token of a training step, and the peak rate of the machine: MFU compares them.

Counted are multiplications and additions of matrix products and of causal attention. Forward and backward together
cost three times the forward pass; twice for frozen weights, which have no gradients. What activation checkpointing
computes again is not counted.
Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B. Differs: attention of a token is over half of its row,
and of a mixture the experts that a token is sent to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from stretto.base.process import thread_env
from stretto_bench.hardware import GPUS

MATMUL_TIMEOUT_S = 60.0
_MATMUL = """
import time, torch
torch.set_num_threads({threads})
a = torch.randn(1024, 1024); best = 1e9
for _ in range(6):
    start = time.perf_counter(); a @ a; best = min(best, time.perf_counter() - start)
print(2 * 1024**3 / best)
"""


def flops_per_token(hf: Mapping[str, Any], row_tokens: int, *, is_frozen: bool = False) -> float | None:
    """Operations of a training step per token in rows of that length; None for a config without the usual keys.

    hf: config.json, or its text_config. is_frozen: adapters are trained; the weights have no gradients of their own.
    """
    hf = hf.get("text_config") or hf
    try:
        hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
        vocab = hf["vocab_size"]
    except KeyError:
        return None
    head_dim = hf.get("head_dim") or hidden // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = hf.get("num_experts") or hf.get("n_routed_experts") or hf.get("num_local_experts")
    if experts:
        width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
        mlp = 3 * hidden * width * (hf["num_experts_per_tok"] + (hf.get("n_shared_experts") or 0))
        mlp += hidden * experts
    else:
        mlp = 3 * hidden * hf["intermediate_size"]
    products = layers * (attention + mlp) + hidden * vocab
    return (4.0 if is_frozen else 6.0) * products + 6.0 * layers * heads * head_dim * row_tokens


def peak_flops(gpu: str | None, threads: int) -> tuple[float, str]:
    """Operations per second that one device could do, and where the figure is from.

    gpu: its name; None: a CPU, whose largest product in float32 is measured.
    """
    if gpu is not None:
        for name, hardware in GPUS.items():
            if name in gpu:
                return hardware.peak("bfloat16"), f"{gpu}, dense bfloat16 of {name}'s data sheet"
        return 0.0, f"{gpu}: its peak is not known here"
    argv = [sys.executable, "-P", "-c", _MATMUL.format(threads=threads)]
    env = {**os.environ, **thread_env(threads)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=MATMUL_TIMEOUT_S, env=env, check=True)
    return float(done.stdout), f"a product of 1024 x 1024 in float32, measured with {threads} threads"
