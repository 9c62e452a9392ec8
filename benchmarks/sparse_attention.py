"""Attention to chosen keys (glm_moe_dsa): memory and time of a training pass, by length of one document.

    python benchmarks/sparse_attention.py [--quick] [--longest 131072]

A random model of tiny width, so that what grows with the tokens is seen beside what grows with their square: two
layers, of which the first has an indexer and the second shares its choice. One forward and backward pass of the whole
document, each length in a process of its own; transformers' modules on the same weights beside it, up to 4096 tokens.
Memory is the peak of the resident set during the pass over what it was before; time is that of one thread. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

from stretto.base.runtime import keep_freed_memory
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.config import parse_config

VOCAB, TOP_K = 64, 64
SHAPE = {
    "model_type": "glm_moe_dsa", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "dense"],
    "index_n_heads": 1, "index_head_dim": 8, "index_topk": TOP_K, "indexer_types": ["full", "shared"],
    "max_position_embeddings": 131_072, "hidden_act": "silu",
}  # fmt: skip
MOST_TOKENS_OF_THEIRS = 4096


def measure(kind: str, num_tokens: int) -> dict[str, float]:
    """Peak MiB over the start, and seconds, of one pass; run in a process of its own."""
    keep_freed_memory()
    torch.manual_seed(0)
    model = hub.build_model(parse_config(SHAPE, "benchmark"), torch.float32, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.3)
    if kind == "transformers":
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as directory:
            hub.save_hf(model, Path(directory))
            theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(1))

    def one_pass(ids: torch.Tensor) -> float:
        if kind == "transformers":
            logits = theirs(input_ids=ids[None], use_cache=False).logits[0]
        else:
            logits = model.hidden(ids, PackedLayout((0, len(ids)), ids.device)) @ model.output_weight.T
        loss = F.cross_entropy(logits[:-1], ids[1:])
        loss.backward()
        return loss.item()

    one_pass(ids[:256])  # compiles kernels, allocates gradients
    before, start = _peak_mib(), time.process_time()
    loss = one_pass(ids)
    return {"mib": _peak_mib() - before, "seconds": time.process_time() - start, "loss": loss}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--longest", type=int, default=131_072)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    longest, num_tokens, results = 2048 if args.quick else args.longest, 1024, []
    while num_tokens <= longest:
        row: dict[str, float | None] = {"tokens": num_tokens}
        for kind in ("ours", "transformers"):
            if kind == "transformers" and num_tokens > MOST_TOKENS_OF_THEIRS:
                continue
            command = [sys.executable, __file__, "--one", kind, str(num_tokens)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row |= {f"{kind}_{key}": value for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
        results.append(row)
        print("  ".join(f"{key} {value:.6g}" for key, value in row.items()), flush=True)
        num_tokens *= 2
    print(json.dumps({"top_k": TOP_K, "passes": results}))


if __name__ == "__main__":
    main()
