"""vLLM's LoRA kernels on a GPU: the policy's adapter beside attention, MLPs and the experts of a mixture."""

from __future__ import annotations

import json
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest
import torch

from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.models.hub import random_model
from stretto.models.lora import Adapter, attach_adapters
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `pip install 'stretto[vllm]'`"),
]
PROMPT = (np.arange(100, dtype=np.int32) * 7 % 90 + 10).astype(np.int32)
SIZES = {
    "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 256, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts")
FLAGS = ("--policy-lora.rank", "8", "--policy-lora.alpha", "16", "--policy-lora.target-modules", json.dumps(TARGETS))
TOLERANCE = 0.05
"""Nats, in bfloat16; what an adapter changes here is some tenths of a nat."""


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "minimax_m2"])
async def test_the_adapter_of_a_policy_is_computed_experts_included(tmp_path, record_property, family):
    from servers import VOCAB, logprobs_of, save, serve

    def build():
        return random_model(ScratchSection(family=family, seed=0, **SIZES), VOCAB, eos_token_id=2)

    publisher, base = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2), build()
    flags = (*FLAGS, "--lora.compute-policy", "true", "--gpu-memory-utilization", "0.2")
    if family != "qwen3":  # graphs of one family; recording them takes a minute each
        flags += ("--enforce-eager",)
    with serve("vllm", save(base, tmp_path / "model"), tmp_path / "log", *flags) as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(300)
            for version in (1, 2):
                policy = build()
                attach_adapters(policy, LoRASection(rank=8, alpha=16.0, target_modules=TARGETS))
                generator = torch.Generator().manual_seed(version)
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.data.normal_(0, 0.1, generator=generator)
                manifest = publisher.publish(version, Adapter.of(policy).tensors())
                await client.update_weights(msgspec.structs.replace(manifest, adapter=AdapterInfo(8, 2.0)))
                [scores] = (await client.score_canary(PROMPT, f"canary-{version}")).values()
                expected = logprobs_of(policy, PROMPT)
                error = float(np.abs(scores.prompt[1:] - expected).mean())
                effect = float(np.abs(logprobs_of(base, PROMPT) - expected).mean())
                record_property(f"error and effect, version {version}", (error, effect))
                assert error < TOLERANCE < effect / 2
    publisher.close()
