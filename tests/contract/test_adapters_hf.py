"""An adapter of a model that transformers computes (impl = "hf"), as policy: vLLM merges it into its weights."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
import torch
from servers import VOCAB, needs_vllm, scores_of, serve

from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import LoRASection
from stretto.models.hf import load_hf_model
from stretto.models.hub import export_tensors
from stretto.models.lora import Adapter, attach_adapters
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

pytestmark = [pytest.mark.slow, needs_vllm]
PROMPT = np.arange(20, 90, dtype=np.int32)
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "glm4": {"attention_bias": True},
    "glm4_moe": {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def save(family: str, path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(BASE | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    build_letters_tokenizer(path)
    model.save_pretrained(path)
    return path


def adapted(model_dir, seed: int, *targets: str):
    """The policy of a directory with a random adapter, as the trainer has it."""
    policy = load_hf_model(model_dir, dtype=torch.float32)
    attach_adapters(policy, LoRASection(rank=4, alpha=8.0, target_modules=targets))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=generator)
    return policy


def logprobs(policy) -> np.ndarray:
    ids = torch.as_tensor(PROMPT, dtype=torch.int64)
    with torch.no_grad():
        logits = policy.wrapped(input_ids=ids[None], use_cache=False).logits[0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()


@pytest.mark.parametrize("family", FAMILIES)
async def test_adapters_of_a_family_of_transformers_come_as_weight_updates(family, tmp_path):
    """Also an adapter of other layers than the last, a whole model in between, and one after its base was deleted."""
    model = save(family, tmp_path / "model")
    first = adapted(model, 1, "q_proj", "v_proj", "down_proj", "gate_up_proj", "gate_proj")
    second = adapted(model, 2, "o_proj")
    whole = adapted(model, 3, "k_proj", "o_proj")
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)

    def of(version: int, policy):
        manifest = publisher.publish(version, Adapter.of(policy).tensors())
        return msgspec.structs.replace(manifest, adapter=AdapterInfo(4, 2.0))

    with serve("vllm", model, tmp_path / "log") as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)

            async def check(version: int, manifest, policy) -> None:
                await client.update_weights(manifest)
                found = await scores_of(client, PROMPT, f"canary-{version}")
                np.testing.assert_allclose(found[1:], logprobs(policy), atol=3e-5, rtol=0)

            await check(1, of(1, first), first)
            await check(2, of(2, second), second)
            await check(3, publisher.publish(3, export_tensors(whole)), whole)
            await check(4, of(4, second), second)
            for file in model.glob("*.safetensors"):
                os.unlink(file)
            await check(5, of(5, first), first)
    publisher.close()
