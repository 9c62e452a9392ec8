"""Families that only transformers has: vLLM samples what its model computes, before and after updates by names.

Updates are whole weights, or adapters, which it computes beside them.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from servers import needs_vllm, scores_of, serve

from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import LoRASection
from stretto.models.attention import PackedLayout
from stretto.models.hf import HFDecoder, load_hf_model
from stretto.models.lora import Adapter, attach_adapters
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

PROMPT = (np.arange(40, dtype=np.int32) * 7 % 90 + 10).astype(np.int32)
SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "mistral": {"sliding_window": None},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {"tie_word_embeddings": False},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "phi3": {"tie_word_embeddings": False},
    "ministral": {"tie_word_embeddings": False},
}


def build(family: str, path) -> HFDecoder:
    """A model directory of random weights, loaded as the trainer loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    build_letters_tokenizer(path)
    torch.manual_seed(0)
    settings = {"tie_word_embeddings": True} | SHAPE | FAMILIES[family]
    config = AutoConfig.for_model(family, vocab_size=load_tokenizer(path).vocab_size, **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return load_hf_model(path, dtype=torch.float32)


@torch.no_grad()
def logprobs_of(model: HFDecoder, ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(np.asarray(ids)).long()
    hidden = model.hidden(tokens, PackedLayout((0, len(ids)), "cpu"))
    table = (hidden @ model.output_weight.T).log_softmax(-1)
    return table[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_of_transformers_is_served_and_updated_by_names(family, tmp_path):
    policy = build(family, tmp_path / "model")
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    with serve("auto", tmp_path / "model", tmp_path / "log") as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            before = logprobs_of(policy, PROMPT)
            for version in range(3):
                if version:
                    with torch.no_grad():
                        for parameter in policy.parameters():
                            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
                    await client.update_weights(publisher.publish(version, policy.export_tensors()))
                    assert abs(logprobs_of(policy, PROMPT) - before).max() > 0.1
                found = await scores_of(client, PROMPT, f"canary-{version}")
                np.testing.assert_allclose(found[1:], logprobs_of(policy, PROMPT), atol=2e-4, rtol=0)
    publisher.close()


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
async def test_adapters_of_a_family_of_transformers_are_computed_beside_its_weights(family, tmp_path):
    base, lora = build(family, tmp_path / "model"), LoRASection(rank=4, alpha=8.0)
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    flags = ("--policy-lora.rank", "4", "--policy-lora.alpha", "8")
    with serve("auto", tmp_path / "model", tmp_path / "log", *flags) as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            assert "computes it beside its weights" in (tmp_path / "log").read_text()
            for version in (1, 2):
                policy = load_hf_model(tmp_path / "model", dtype=torch.float32)
                attach_adapters(policy, lora)
                generator = torch.Generator().manual_seed(version)
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.data.normal_(0, 0.1, generator=generator)
                assert abs(logprobs_of(policy, PROMPT) - logprobs_of(base, PROMPT)).max() > 0.1
                manifest = publisher.publish(version, Adapter.of(policy).tensors())
                await client.update_weights(msgspec.structs.replace(manifest, adapter=AdapterInfo(4, 2.0)))
                found = await scores_of(client, PROMPT, f"canary-{version}")
                np.testing.assert_allclose(found[1:], logprobs_of(policy, PROMPT), atol=2e-4, rtol=0)
    publisher.close()
