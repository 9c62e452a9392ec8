"""Every family of models here beside transformers: tokens per CPU second of a training pass and of decoding.

    python benchmarks/models.py [--quick] [--families qwen3,glm4_moe] [--dtype bfloat16] [--part train]

Both sides have the same random tiny model (saved once, loaded by both), one thread, in turns in one process.
Trainer: forward and backward of packed rows; transformers gets the same documents as rows of equal length. Engine: the
embedded one decodes against transformers' `generate` with a cache. Families with a vision tower have an image in every
document, and another one in every prompt. CPU seconds are process time; figures are medians. A
family that the engine does not serve says why. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import nn

from stretto.base.errors import StrettoError
from stretto.families.table import FAMILIES
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.attention import PackedLayout
from stretto.models.hub import load_model
from stretto.models.lm_head import token_logprobs
from stretto.models.parts.image_positions import image_positions
from stretto.models.parts.vision import ImageBatch
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.images import Image, image_of

PARTS = ("train", "decode")
VOCAB, DOCUMENTS, TOKENS = 512, 16, 64
PROMPT_TOKENS, REPLY_TOKENS = 16, 48
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 64, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "shared_expert_intermediate_size": 64,
}  # fmt: skip
MLA = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
INDEXER = {"index_topk": 32, "index_n_heads": 2, "index_head_dim": 32}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MORE: dict[str, dict[str, object]] = {
    "deepseek_v3": MLA,
    "glm_moe_dsa": MLA | INDEXER,
    "deepseek_v32": MLA | INDEXER,
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "minimax_m2": {"intermediate_size": 64, "rotary_dim": 16},
    "gpt_oss": {"intermediate_size": 64, "sliding_window": 32},
    "afmoe": {"sliding_window": 32, "num_shared_experts": 1},
    "laguna": {"sliding_window": 32},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "moe_shared_expert_intermediate_size": 64, "chunk_size": 32,
    },
}  # fmt: skip
WITHOUT_EXPERTS = ("llama", "qwen2", "qwen3", "glm4", "qwen3_5_text", "qwen3_vl", "qwen3_5")
IMAGE_TOKEN, GRID, MERGE = 3, (1, 4, 4), 2
IMAGE_TOKENS = GRID[1] * GRID[2] // MERGE**2
TOWER = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 8,
    "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64,
}  # fmt: skip
PATCH_VALUES = 3 * 2 * 8 * 8
VISION = {
    "qwen3_vl": {"deepstack_visual_indexes": [1, 3]}, "qwen3_vl_moe": {"deepstack_visual_indexes": [1, 3]},
    "qwen3_5": {}, "qwen3_5_moe": {},
}  # fmt: skip
"""Families with a tower, and what of TOWER differs."""


def save_random(family: str, directory: Path) -> nn.Module:
    """A random model of transformers', saved for both sides."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    settings = COMMON | ({} if family in WITHOUT_EXPERTS else EXPERTS) | MORE.get(family, {})
    if family in VISION:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
        text = settings | ({"rope_parameters": rope | {"partial_rotary_factor": 1.0}} | DELTA)
        ids = {"image_token_id": IMAGE_TOKEN, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
        config = AutoConfig.for_model(
            family, text_config=text, vision_config=TOWER | VISION[family], tie_word_embeddings=False, **ids
        )
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return model


def median_rates(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Tokens per CPU second of each side, in turns, after one round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, run in sides.items():
            start = time.process_time()
            tokens = run()
            if round_:
                rates[name].append(tokens / (time.process_time() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def pictures() -> list[Image]:
    """One image of noise per document."""
    noise = np.random.default_rng(2).standard_normal((DOCUMENTS, GRID[1] * GRID[2], PATCH_VALUES), np.float32)
    return [image_of(patches, GRID) for patches in noise]


def their_images(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same images as arguments of transformers."""
    patches = torch.from_numpy(np.concatenate([image.patches for image in pictures()]))
    grids = torch.tensor([GRID] * DOCUMENTS)
    return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE_TOKEN).int()}


def train_sides(ours: nn.Module, theirs: nn.Module) -> dict[str, Callable[[], int]]:
    """Forward and backward of the same documents."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(7, VOCAB, (DOCUMENTS, TOKENS)))
    has_images = ours.config.vision is not None
    if has_images:
        ids[:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    bounds = np.arange(0, DOCUMENTS * TOKENS + 1, TOKENS)
    rows, targets = ids.flatten(), ids.roll(-1, 1).flatten()
    layout, images, theirs_too = PackedLayout(tuple(bounds.tolist()), torch.device("cpu")), None, {}
    if has_images:
        grids = np.array([GRID] * DOCUMENTS)
        at = image_positions(rows.numpy(), bounds, grids, image_token_id=IMAGE_TOKEN, merge_size=MERGE)
        layout = PackedLayout(tuple(bounds.tolist()), torch.device("cpu"), image_positions=torch.from_numpy(at))
        theirs_too = their_images(ids)
        images = ImageBatch(theirs_too["pixel_values"], grids, (rows == IMAGE_TOKEN).nonzero().squeeze(1))

    def train_ours() -> int:
        hidden = ours.hidden(rows, layout, images=images)
        logprobs, _ = token_logprobs(hidden, ours.output_weight, targets, torch.ones(len(rows)), len(rows))
        (-logprobs.mean()).backward()
        ours.zero_grad(set_to_none=True)
        return rows.numel()

    def train_theirs() -> int:
        logits = theirs(input_ids=ids, use_cache=False, **theirs_too).logits.flatten(0, 1)
        nn.functional.cross_entropy(logits, targets).backward()
        theirs.zero_grad(set_to_none=True)
        return rows.numel()

    return {"stretto": train_ours, "transformers": train_theirs}


def decode_sides(core: EngineCore, theirs: nn.Module) -> dict[str, Callable[[], int]]:
    """Replies of the same length to the same prompts."""
    prompts = np.random.default_rng(1).integers(7, VOCAB, (DOCUMENTS, PROMPT_TOKENS)).astype(np.int32)
    has_images, shown = core.config.vision is not None, {}
    if has_images:
        prompts[:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
        shown = their_images(torch.from_numpy(prompts))
    count = 0

    def decode_ours() -> int:
        nonlocal count
        count += 1
        sampling = SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True, seed=count)
        for i, row in enumerate(prompts):
            asked = GenerateRequest(
                request_id=f"{count} {i}", prompt_ids=row, sampling=sampling, cache_salt=str(count),
                images=(pictures()[i],) if has_images else (), image_token_id=IMAGE_TOKEN if has_images else None,
            )  # fmt: skip
            core.submit(core.build_request(asked))
        while core.has_work:
            core.step()
        return DOCUMENTS * REPLY_TOKENS

    @torch.no_grad()
    def decode_theirs() -> int:
        theirs.generate(
            torch.from_numpy(prompts).long(), attention_mask=torch.ones(prompts.shape, dtype=torch.long),
            min_new_tokens=REPLY_TOKENS, max_new_tokens=REPLY_TOKENS, do_sample=True, **shown,
        )  # fmt: skip
        return DOCUMENTS * REPLY_TOKENS

    return {"stretto": decode_ours, "transformers": decode_theirs}


def measure(family: str, rounds: int, dtype: torch.dtype, parts: Sequence[str]) -> dict[str, object]:
    """Rates and ratios of one family."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        theirs = save_random(family, Path(directory)).to(dtype)
        if "train" in parts:
            ours = load_model(directory, dtype=dtype)
            found["train"] = median_rates(train_sides(ours.train(), theirs.train()), rounds)
        if "decode" not in parts:
            return found
        try:
            core = EngineCore(load_model(directory, dtype=dtype), CoreSettings(kv_cache_tokens=8192))
            found["decode"] = median_rates(decode_sides(core, theirs.eval()), rounds)
        except StrettoError as error:
            found["decode"] = str(error)
    return found


def shown(rates: object) -> str:
    if not isinstance(rates, dict):
        return f"no engine yet: {rates}"
    ours, theirs = rates["stretto"], rates["transformers"]
    return f"{ours:>7.0f} / {theirs:>6.0f} = {ours / theirs:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print("tokens per CPU second, stretto / transformers = ratio")
    for family in arguments.families.split(","):
        rounds, dtype = 1 if arguments.quick else 5, getattr(torch, arguments.dtype)
        found = results[family] = measure(family, rounds, dtype, arguments.part or PARTS)
        print(f"{family:<17}", *(f"{part} {shown(rates)}  " for part, rates in found.items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
