"""Every family in vLLM: it samples from the trainer's distribution, and weights, choices and adapters are the model's.

One start per family. In vLLM's CPU build here; what it does not run is refused before it starts (vllm_models.py).
"""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from servers import VOCAB, logprobs_of, needs_vllm, save, scores_of, serve
from test_contract_moe import choices_of

from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.models.hub import export_tensors, random_model
from stretto.models.lora import Adapter, attach_adapters
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

PROMPT = (np.arange(100, dtype=np.int32) * 7 % 90 + 10).astype(np.int32)
SIZES = {
    "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
WHOLE = LoRASection(rank=4, alpha=8.0)
FAMILIES = ("glm4", "glm4_moe", "minimax_m2", "afmoe", "laguna")


def build(family: str, seed: int, is_wide: bool = False):
    """is_wide: for a family whose heads are as wide as the model divided by their number."""
    sizes = SIZES | ({"hidden_size": 128} if is_wide else {})
    return random_model(ScratchSection(family=family, seed=seed, **sizes), VOCAB, eos_token_id=2)


def adapted(family: str, seed: int, lora: LoRASection = WHOLE, is_wide: bool = False):
    model = build(family, 0, is_wide)
    attach_adapters(model, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=generator)
    return model


async def sample(client: EngineClient, model, name: str) -> Completion:
    """A reply, whose log-probabilities and experts are this model's."""
    sampling = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    request = GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, cache_salt=name)
    [completion] = await client.generate(request)
    ids = np.concatenate([PROMPT, completion.token_ids])
    expected = logprobs_of(model, ids)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=3e-5, rtol=0)
    if model.config.moe is not None:
        routes = completion.routed_experts[:-1, model.config.moe.sparse_layers]
        assert completion.routed_experts.shape[1] == model.config.num_layers
        assert np.array_equal(np.sort(routes, axis=-1), choices_of(model, ids)[:-1])
    return completion


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_is_served_and_updated(family, tmp_path):
    model, other = build(family, 0), build(family, 1)
    flags = () if model.config.moe is None else ("--enable-return-routed-experts",)
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    with serve("vllm", save(model, tmp_path / "model"), tmp_path / "log", *flags) as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            await sample(client, model, "first")

            async def check(version: int, tensors, policy, adapter: AdapterInfo | None = None) -> None:
                manifest = publisher.publish(version, tensors)
                await client.update_weights(msgspec.structs.replace(manifest, adapter=adapter))
                found = await scores_of(client, PROMPT, f"canary-{version}")
                np.testing.assert_allclose(found[1:], logprobs_of(policy, PROMPT), atol=3e-5, rtol=0)
                await sample(client, policy, f"after-{version}")

            await check(1, export_tensors(other), other)
            for version in (2, 3):
                policy = adapted(family, version)
                await check(version, Adapter.of(policy).tensors(), policy, AdapterInfo(4, 2.0))
            await check(4, export_tensors(other), other)
    publisher.close()


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FLAGS = ("--policy-lora.rank", "4", "--policy-lora.alpha", "8", "--policy-lora.target-modules", json.dumps(TARGETS))
"""What the launcher tells an engine of the adapter that a run trains."""


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "qwen2", "qwen3_moe"])
async def test_adapters_of_a_family_are_computed_beside_its_weights(family, tmp_path):
    """Those of attention, of the MLP of dense layers, and of the MLP beside the experts."""
    lora, wide = LoRASection(rank=4, alpha=8.0, target_modules=TARGETS), family == "qwen2"
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    with serve("vllm", save(build(family, 0, wide), tmp_path / "model"), tmp_path / "log", *FLAGS) as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            assert "computes it beside its weights" in (tmp_path / "log").read_text()
            for version in (0, 1, 2):
                policy = build(family, 0, wide) if not version else adapted(family, version, lora, wide)
                if version:
                    manifest = publisher.publish(version, Adapter.of(policy).tensors())
                    await client.update_weights(msgspec.structs.replace(manifest, adapter=AdapterInfo(4, 2.0)))
                found = await scores_of(client, PROMPT, f"canary-{version}")
                np.testing.assert_allclose(found[1:], logprobs_of(policy, PROMPT), atol=3e-5, rtol=0)
    publisher.close()


@pytest.mark.slow
@needs_vllm
async def test_updates_of_gpt_oss_leave_vllm_as_if_it_had_been_started_with_them(tmp_path):
    """On a CPU vLLM computes gpt_oss a little differently, so runs are refused there; updates are whole."""
    policies = [loud(build("gpt_oss", 0), seed) for seed in (1, 2)]
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    found = []
    for start, policy in enumerate(policies):
        directory = save(policy, tmp_path / f"model-{start}")
        with serve("vllm", directory, tmp_path / f"log-{start}", start=Allowed) as (url, _):
            async with EngineClient([url], timeout_s=120) as client:
                await client.wait_ready(120)
                before = await scores_of(client, PROMPT, "before")
                manifest = publisher.publish(start + 1, export_tensors(policies[1 - start]))
                await client.update_weights(manifest)
                after = await scores_of(client, PROMPT, "after")
                found.append((before[1:], after[1:]))
    publisher.close()
    assert abs(found[0][0] - found[1][0]).max() > 0.3
    for start in (0, 1):
        np.testing.assert_allclose(found[start][1], found[1 - start][0], atol=1e-5, rtol=0)


class Allowed(subprocess.Popen):
    """An engine that is started although its model is refused on CPUs."""

    def __init__(self, words: list[str], **options: object) -> None:
        at = words.index("stretto")
        code = (
            "from stretto_vllm.plan.models import ServedModel\n"
            "ServedModel.check_on_cpu = lambda self: None\n"
            "import sys\n"
            "from stretto.cli import main\n"
            "sys.exit(main(sys.argv[1:]))"
        )
        super().__init__([sys.executable, "-c", code, *words[at + 1 :]], **options)


def loud(model, seed: int):
    """The model with other experts and sinks, which change its log-probabilities much; the rest stays."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "sinks" in name:
                parameter.normal_(0, 1.0 if "sinks" in name else 0.1, generator=generator)
    return model
