"""How far trainer and engine are apart if either, both or none computes in 8 bits: mismatch KL of the four.

    python benchmarks/fp8_mismatch.py [--quick]

Random Qwen3 models without and with experts, sharpened so that distributions are not flat, on a CPU. The embedded
engine samples with the weights that the trainer publishes, as they are or in the layout of an 8-bit checkpoint (blocks
of 128 x 128, rounded inputs); the trainer scores the same tokens plainly, or with fp8 = "reference". The figure is what
the trainer reports as `mismatch_kl`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.config.sections.model import ScratchSection
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.fp8.checkpoint import BlockLayout, round_inputs, to_8_bits
from stretto.models.fp8.reference import Kernels, use_fp8
from stretto.models.hub import build_model, export_tensors, load_tensors, random_model
from stretto.records.generate import GenerateRequest, SamplingParams

VOCAB = 256
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "head_dim": 64}
KEPT = ("lm_head", "embed_tokens", "norm", "mlp.gate.")
PROMPT_TOKENS, REPLY_TOKENS = 16, 64


def build_policy(family: str, dtype: torch.dtype) -> Decoder:
    """A random model with larger weights than at initialisation."""
    policy = random_model(ScratchSection(family=family, num_layers=4, **SHAPE), VOCAB, eos_token_id=1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return policy.to(dtype)


def build_engine(policy: Decoder, *, is_8_bit: bool) -> EngineCore:
    """An engine with the weights that the trainer publishes."""
    dtype = policy.output_weight.dtype
    names = [n for n, _ in export_tensors(policy) if n.endswith("weight") and not any(k in n for k in KEPT)]
    layout = BlockLayout(frozenset(names))
    model = build_model(policy.config, dtype, "cpu")
    tensors = export_tensors(policy)
    load_tensors(model, to_8_bits(tensors, layout) if is_8_bit else tensors)
    if is_8_bit:
        model.layout = layout
        round_inputs(model, layout.names, model.tensor_map)
    return EngineCore(model, CoreSettings(max_model_len=128, kv_cache_tokens=32_768, use_kernels=not is_8_bit))


def sample(core: EngineCore, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids of prompt and reply, log-probabilities of the reply) of each request."""
    prompts = np.random.default_rng(0).integers(2, VOCAB, (count, PROMPT_TOKENS)).astype(np.int32)
    sampling = SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True, seed=0)
    requests = [
        core.build_request(GenerateRequest(request_id=str(i), prompt_ids=row, sampling=sampling))
        for i, row in enumerate(prompts)
    ]
    for request in requests:
        core.submit(request)
    while core.has_work:
        core.step()
    replies = [request.completions[0] for request in requests]
    return [(np.concatenate((row, reply.token_ids)), reply.logprobs) for row, reply in zip(prompts, replies)]


@torch.no_grad()
def score(policy: Decoder, ids: np.ndarray) -> np.ndarray:
    """The trainer's log-probabilities of a reply."""
    layout = PackedLayout((0, len(ids)), torch.device("cpu"))
    hidden = policy.hidden(torch.from_numpy(ids).long(), layout)
    logprobs = (hidden @ policy.output_weight.T).float().log_softmax(-1)[PROMPT_TOKENS - 1 : -1]
    return logprobs.gather(1, torch.from_numpy(ids[PROMPT_TOKENS:]).long()[:, None])[:, 0].numpy()


def measure(family: str, dtype: torch.dtype, count: int) -> dict[str, float]:
    """Mismatch KL, nats per token, by `trainer x engine`."""
    found = {}
    samples = {
        engine: sample(build_engine(build_policy(family, dtype), is_8_bit=engine == "8 bits"), count)
        for engine in ("plain", "8 bits")
    }
    for trainer in ("plain", "8 bits"):
        policy = build_policy(family, dtype)
        if trainer == "8 bits":
            use_fp8(policy.model.layers, Kernels())
        for engine, rows in samples.items():
            log_ratio = np.concatenate([score(policy, ids) - logprobs for ids, logprobs in rows])
            found[f"{trainer} x {engine}"] = float(np.mean(np.expm1(log_ratio) - log_ratio))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    count = 8 if parser.parse_args().quick else 64
    results = {}
    for family in ("qwen3", "qwen3_moe"):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{family} {str(dtype).removeprefix('torch.')}"
            results[name] = measure(family, dtype, count)
            for pair, value in results[name].items():
                print(f"{name:<20} trainer x engine: {pair:<18} mismatch KL {value:.2e}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
