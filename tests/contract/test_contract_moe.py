"""Mixtures of experts on every engine: weights are updated and restored, and expert choices are the model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from servers import VOCAB, logprobs_of, needs_vllm, scores_of, serve_ready

from stretto.config.sections.model import ScratchSection
from stretto.models.attention import PackedLayout
from stretto.models.hub import export_tensors, random_model
from stretto.models.moe import Routing
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

PROMPT = (np.arange(100, dtype=np.int32) * 7 % 90 + 10).astype(np.int32)


def mixture(seed: int):
    section = ScratchSection(
        family="qwen3_moe",
        seed=seed,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=512,
    )
    return random_model(section, VOCAB, eos_token_id=2)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])])
def engine(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with serve_ready(request.param, mixture(0), directory, "--enable-return-routed-experts") as url:
        yield url


def choices_of(model, token_ids) -> np.ndarray:
    """[tokens, layers, top_k] of one plain forward pass, each token's choices sorted."""
    ids, routing = torch.as_tensor(token_ids, dtype=torch.int64), Routing(is_recording=True)
    with torch.no_grad():
        model.hidden(ids, PackedLayout((0, len(ids)), ids.device), routing=routing)
    layers = [routing.choices[layer] for layer in sorted(routing.choices)]
    return np.sort(torch.stack(layers, dim=1).numpy(), axis=-1)


def ask(name: str, salt: str, start: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_tokens=12, seed=1, ignore_eos=True),
        cache_salt=salt,
        routed_experts_start=start,
    )


async def test_choices_of_every_token_are_the_models_also_from_the_prefix_cache(engine):
    async with EngineClient([engine], timeout_s=120) as client:
        for name in ("cold", "warm"):
            [completion] = await client.generate(ask(name, "same"))
            routes = completion.routed_experts
            ids = np.concatenate([PROMPT, completion.token_ids])
            assert routes is not None and len(routes) == len(ids)
            assert np.array_equal(np.sort(routes[:-1], axis=-1), choices_of(mixture(0), ids)[:-1])
            assert (completion.cached_tokens >= 64) == (name == "warm")


async def test_choices_that_are_known_are_not_sent_again(engine):
    async with EngineClient([engine], timeout_s=120) as client:
        [whole] = await client.generate(ask("whole", "known"))
        [rest] = await client.generate(ask("rest", "known", start=90))
        assert whole.routed_experts is not None and rest.routed_experts is not None
        assert len(rest.routed_experts) == len(whole.routed_experts) - 90
        assert np.array_equal(rest.routed_experts[:-1], whole.routed_experts[90:-1])


async def test_experts_change_there_and_back_and_there(engine, tmp_path):
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    async with EngineClient([engine], timeout_s=120) as client:
        for version, seed in enumerate((1, 0, 1, 0), start=1):
            await client.update_weights(publisher.publish(version, export_tensors(mixture(seed))))
            scores = await scores_of(client, PROMPT, f"canary-{version}")
            expected = logprobs_of(mixture(seed), PROMPT)
            np.testing.assert_allclose(scores[1:], expected, atol=2e-5, rtol=0)
            [completion] = await client.generate(ask(f"after-{version}", str(version)))
            ids = np.concatenate([PROMPT, completion.token_ids])
            assert completion.routed_experts is not None
            found = np.sort(completion.routed_experts[:-1], axis=-1)
            assert np.array_equal(found, choices_of(mixture(seed), ids)[:-1])
    publisher.close()
