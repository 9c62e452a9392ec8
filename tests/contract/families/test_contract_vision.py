"""Models with images in vLLM: tokens and pixels in, and log-probabilities, updates and canary are the trainer's.

The language model and the tower are updated, and what the tower made of an image before is not used again. On a CPU
vLLM does not run the recurrent families (vllm_models.py).
"""

from __future__ import annotations

import subprocess

import msgspec
import numpy as np
import pytest
import torch
from cases import vision
from cases.vision import END, IMAGE, START, image
from servers import VOCAB, needs_vllm, save, scores_of, serve
from transformers import AutoConfig

from stretto.chat.patches import ImageProcessor
from stretto.config.sections.model import LoRASection
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.config import parse_config, to_hf
from stretto.models.lora import Adapter, attach_adapters
from stretto.models.moe import Routing
from stretto.models.parts.image_positions import image_positions
from stretto.models.parts.vision import ImageBatch
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

IMAGES = (image((1, 4, 6), 0), image((1, 2, 2), 1), image((1, 8, 4), 2))
FAMILIES = ("qwen3_vl", "qwen3_vl_moe")
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
}  # fmt: skip
"""vLLM's CPU attention has heads of 32 dims at least."""
TOWER = {"hidden_size": 64, "out_hidden_size": 64}


def build(family: str, seed: int):
    _, keys = vision.config_keys(family)
    keys["text_config"] |= TEXT
    keys["vision_config"] |= TOWER
    config = parse_config(AutoConfig.for_model(family, **keys).to_dict(), family)
    written = to_hf(config)  # as published checkpoints have it, which say more than transformers' default
    config.hf.clear()
    config.hf.update(written)
    model = hub.build_model(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + (parameter.dim() == 1))
    return model


def prompt_of(images: tuple = IMAGES) -> np.ndarray:
    ids = [5, 6, 7]
    for each in images:
        ids += [START, *[IMAGE] * each.num_tokens(2), END, 9, 8]
    return np.array(ids, np.int32)


@torch.no_grad()
def scored(model, ids: np.ndarray, images: tuple) -> tuple[np.ndarray, np.ndarray | None]:
    """Log-probabilities of a document, float32 [tokens - 1], and its experts, as the trainer's pass has them."""
    tokens, grids = torch.from_numpy(ids).long(), np.array([each.grid for each in images], int).reshape(-1, 3)
    positions = image_positions(ids, np.array([0, len(ids)]), grids, image_token_id=IMAGE, merge_size=2)
    layout = PackedLayout((0, len(ids)), tokens.device, image_positions=torch.from_numpy(positions))
    patches = [torch.from_numpy(each.patches.copy()) for each in images]
    rows = (tokens == IMAGE).nonzero().squeeze(1)
    batch = ImageBatch(torch.cat(patches), grids, rows) if images else None
    routing = Routing(is_recording=True)
    logits = model.hidden(tokens, layout, images=batch, routing=routing) @ model.output_weight.T
    logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()
    if not routing.choices:
        return logprobs, None
    choices = torch.stack([routing.choices[layer] for layer in sorted(routing.choices)], dim=1)
    return logprobs, np.sort(choices.numpy(), axis=-1)


async def check_sample(client: EngineClient, model, name: str, images: tuple = IMAGES) -> Completion:
    """A reply to a prompt with these images has the model's log-probabilities and experts."""
    request = GenerateRequest(
        request_id=name,
        prompt_ids=prompt_of(images),
        sampling=SamplingParams(max_tokens=12, seed=1, ignore_eos=True),
        cache_salt=name,
        images=images,
        image_token_id=IMAGE if images else None,
    )
    [completion] = await client.generate(request)
    ids = np.concatenate([request.prompt_ids, completion.token_ids])
    if IMAGE in completion.token_ids:  # a placeholder that was sampled stands for no image
        return completion
    logprobs, choices = scored(model, ids, images)
    expected = logprobs[len(request.prompt_ids) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=3e-5, rtol=0)
    if choices is not None:
        routes = completion.routed_experts[:-1, model.config.moe.sparse_layers]
        assert np.array_equal(np.sort(routes, axis=-1), choices[:-1])
    return completion


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
async def test_images_are_what_the_trainer_sees_before_and_after_updates(family, tmp_path):
    model, other = build(family, 0), build(family, 1)
    directory = save(model, tmp_path / "model")
    ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096).save(directory)
    flags = () if model.config.moe is None else ("--enable-return-routed-experts",)
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    # Forked from a process that has transformers, which has looked for torchvision, it would not find any.
    started = serve("vllm", directory, tmp_path / "log", *flags, start=subprocess.Popen)
    with started as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            seen = await check_sample(client, model, "first")
            again = await check_sample(client, model, "reversed", IMAGES[::-1])
            assert not np.array_equal(seen.logprobs, again.logprobs), "the control: other images, other numbers"
            await check_sample(client, model, "text", ())
            for version, policy in enumerate((other, model), start=1):
                await client.update_weights(publisher.publish(version, hub.export_tensors(policy)))
                text = prompt_of(())
                found = await scores_of(client, text, f"canary-{version}")
                np.testing.assert_allclose(found[1:], scored(policy, text, ())[0], atol=3e-5, rtol=0)
                await check_sample(client, policy, f"after-{version}")
    publisher.close()


@pytest.mark.slow
@needs_vllm
async def test_an_adapter_beside_the_language_model_is_computed_with_images(tmp_path):
    directory, lora = save(build("qwen3_vl", 0), tmp_path / "model"), LoRASection(rank=4, alpha=8.0)
    ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096).save(directory)
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    flags = ("--policy-lora.rank", "4", "--policy-lora.alpha", "8")
    with serve("vllm", directory, tmp_path / "log", *flags, start=subprocess.Popen) as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            assert "computes it beside its weights" in (tmp_path / "log").read_text()
            for version in (1, 2):
                policy = build("qwen3_vl", 0)
                attach_adapters(policy, lora)
                generator = torch.Generator().manual_seed(version)
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.data.normal_(0, 0.2, generator=generator)
                manifest = publisher.publish(version, Adapter.of(policy).tensors())
                await client.update_weights(msgspec.structs.replace(manifest, adapter=AdapterInfo(4, 2.0)))
                await check_sample(client, policy, f"after-{version}")
    publisher.close()
