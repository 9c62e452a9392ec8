"""Tiny models with images, and rows for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from tiny import document, pack

from stretto.families.table import FAMILIES
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.config import parse_config
from stretto.models.decoder import Decoder
from stretto.models.parts.image_positions import image_positions
from stretto.models.parts.norm import CentredRMSNorm
from stretto.models.parts.vision import ImageBatch
from stretto.records.images import Image, image_of
from stretto.records.sample import MicroBatch, images_by_document

VOCAB, IMAGE, START, END = 60, 50, 52, 53
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8,
}  # fmt: skip
TOWER = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
RECURRENT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "rope_parameters":
    {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
    "rms_norm_eps": 1e-3,
}  # fmt: skip
"""What a random recurrent layer computes of an image can nearly vanish. Its norm enlarges the rounding with it: with an
eps of 1e-6 trainer and engine are both 1e-4 nats off the result of float64."""
DEEPSTACK = {"deepstack_visual_indexes": [0, 2]}
VISION_CASES: dict[str, tuple[str, dict, dict, dict]] = {
    "qwen3_vl": ("qwen3_vl", SECTIONS, DEEPSTACK, {}),
    "qwen3_vl-tied-every-layer": (
        "qwen3_vl",
        {"attention_bias": True},
        {"deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 25},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl-heads-of-16": (  # the kernels in C compute it
        "qwen3_vl",
        SECTIONS | {"head_dim": 16, "rope_parameters": SECTIONS["rope_parameters"] | {"mrope_section": [3, 3, 2]}},
        DEEPSTACK,
        {},
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", SECTIONS | MOE | {"mlp_only_layers": [1]}, DEEPSTACK, {}),
    "qwen3_5": ("qwen3_5", RECURRENT, {}, {}),
    "qwen3_5_moe": ("qwen3_5_moe", RECURRENT | MOE | {"shared_expert_intermediate_size": 16}, {}, {}),
}
VISION_CASES = {name: case for name, case in VISION_CASES.items() if case[0] in FAMILIES}
"""Name: model_type, and what of text_config, vision_config and the rest is not as above, of families that are here."""

PATCH_VALUES = 3 * 2 * 4 * 4


def config_keys(case: str) -> tuple[str, dict]:
    """model_type, and keys for transformers' AutoConfig."""
    family, text, tower, more = VISION_CASES[case]
    ids = {
        "image_token_id": IMAGE, "video_token_id": 51, "vision_start_token_id": START, "vision_end_token_id": END
    }  # fmt: skip
    return family, {"text_config": TEXT | text, "vision_config": TOWER | tower} | ids | more


def image_document(grids: list[tuple[int, int, int]], seed: int, num_text: int = 4) -> np.ndarray:
    """Token ids of a document with these images, and text before, between and behind them."""
    random = np.random.default_rng(seed)
    text = lambda: random.integers(0, IMAGE, num_text).tolist()
    ids = text()
    for t, h, w in grids:
        ids += [START, *[IMAGE] * (t * h * w // 4), END, *text()]
    return np.array(ids, np.int32)


def patches_of(grids: list[tuple[int, int, int]], seed: int) -> torch.Tensor:
    """Random patches of these images."""
    num = int(np.array(grids, int).reshape(-1, 3).prod(1).sum())
    return torch.randn(num, PATCH_VALUES, generator=torch.Generator().manual_seed(seed))


def build_vision_policy(case: str, seed: int = 0) -> Decoder:
    """One of these models, with weights that are not as at the start."""
    from transformers import AutoConfig

    family, keys = config_keys(case)
    config = AutoConfig.for_model(family, **keys).to_dict()
    policy = hub.build_model(parse_config(config, case), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    centred = {id(module.weight) for module in policy.modules() if isinstance(module, CentredRMSNorm)}
    with torch.no_grad():
        for parameter in policy.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(values + (parameter.dim() == 1 and id(parameter) not in centred))
    return policy


@torch.no_grad()
def logprobs_alone(
    policy: Decoder, ids: np.ndarray, images: Sequence[Image], image_token_id: int = IMAGE
) -> np.ndarray:
    """Logprob of every token but the first, by the model without learner, engine, packing and sharing."""
    tokens = torch.from_numpy(ids).long()
    layout = PackedLayout((0, len(ids)), tokens.device)
    batch = None
    if images:
        grids = np.array([each.grid for each in images])
        positions = image_positions(ids, np.array([0, len(ids)]), grids, image_token_id=image_token_id, merge_size=2)
        layout = PackedLayout((0, len(ids)), tokens.device, image_positions=torch.from_numpy(positions))
        patches = torch.from_numpy(np.concatenate([each.patches for each in images]))
        batch = ImageBatch(patches, grids, (tokens == image_token_id).nonzero().squeeze(1))
    logits = policy.hidden(tokens, layout, images=batch) @ policy.output_weight.T
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1).numpy()


def image(grid: tuple[int, int, int], seed: int) -> Image:
    """A picture of noise."""
    return image_of(patches_of([grid], seed).numpy(), grid)


def image_group(seed: int, images: list[Image], group_size: int = 3) -> list[tuple[dict, tuple[Image, ...]]]:
    """Samples that share a prompt with these images; the last one sees the first image again after its reply began."""
    rng = np.random.default_rng(seed)
    prompt = image_document([each.grid for each in images], seed, num_text=2)
    group = [(document(rng, prompt, int(rng.integers(2, 6))), tuple(images)) for _ in range(group_size)]
    last, seen = group[-1][0], images[:1]
    shown = image_document([each.grid for each in seen], seed + 1, num_text=1)
    tail = document(rng, shown, 2)
    longer = {name: np.concatenate((last[name], tail[name])) for name in last}
    longer["temperatures"][:] = last["temperatures"][0]
    return [*group[:-1], (longer, (*images, *seen))]


def pack_images(samples: list[tuple[dict, tuple[Image, ...]]]) -> MicroBatch:
    """One row of samples and their images."""
    documents, images = zip(*samples)
    return replace(pack(list(documents)), **images_by_document(images))


def image_batches(num_steps: int) -> list[list[MicroBatch]]:
    """Micro batches of every step: one row of text only, one with an image, one with several."""
    steps = []
    for step in range(num_steps):
        small, large = image((1, 2, 4), 2 * step), image((2, 4, 4), 2 * step + 1)
        groups = [
            image_group(3 * step, []),
            image_group(3 * step + 1, [small]),
            image_group(3 * step + 2, [large, small]),
        ]
        steps.append([pack_images(group) for group in groups])
    return steps
