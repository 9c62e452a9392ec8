"""Models with images: qwen3_vl, qwen3_vl_moe.

Each is a family of text with a vision tower (parts/vision.py) and positions of three axes; its config.json has the keys
of the text family in `text_config`. Qwen3-VL also has deepstack. Films are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stretto.base.errors import DataError
from stretto.families.family import Family, Keys, Scratch, WeightRule, scratch_moe, scratch_rope
from stretto.families.own.dense import QWEN3
from stretto.families.own.qwen3_moe import QWEN3_MOE
from stretto.families.shape import ModelConfig, Rope, VisionShape
from stretto.families.traits import Implied, Traits, VllmTraits

_NESTED = ("text_config", "vision_config")
_VISION_KEYS = Keys(
    depth=("depth", 27),
    hidden_size=("hidden_size", 1152),
    intermediate_size=("intermediate_size", 4304),
    num_heads=("num_heads", 16),
    in_channels=("in_channels", 3),
    patch_size=("patch_size", 16),
    temporal_patch_size=("temporal_patch_size", 2),
    merge_size=("spatial_merge_size", 2),
    out_size=("out_hidden_size", 3584),
)
"""Fields of VisionShape, their keys in `vision_config`, and the defaults."""
_ROPE_THETA = 10_000.0
_DEEPSTACK = "deepstack_visual_indexes"


def _normalise(hf: dict[str, Any]) -> dict[str, Any]:
    """The keys of text_config beside the outer ones; only the outer tie_word_embeddings counts."""
    for key in _NESTED:
        if not isinstance(hf.get(key) or {}, Mapping):
            raise DataError(f"config.json: {key} = {hf[key]!r:.60} must be a table of keys and values")
    text = dict(hf.get("text_config") or {})
    text.pop("tie_word_embeddings", None)
    outer = {key: value for key, value in hf.items() if key != "text_config"}
    return outer | text | {"model_type": hf["model_type"]}


def _vision_shape(hf: dict[str, Any], *, has_deepstack: bool) -> VisionShape:
    vision = hf["vision_config"]
    cells = vision.get("num_position_embeddings", 2304)
    rope = vision.get("rope_parameters") or {}
    return VisionShape(
        **_VISION_KEYS.read(vision),
        grid_side=int(cells**0.5),
        rope_theta=float(rope.get("rope_theta") or _ROPE_THETA),
        image_token_id=hf["image_token_id"],
        deepstack_blocks=tuple(vision.get(_DEEPSTACK, (8, 16, 24))) if has_deepstack else (),
    )


def _vision_to_hf(cfg: ModelConfig, *, has_deepstack: bool) -> dict[str, Any]:
    shape = cfg.vision
    assert shape is not None
    keys = _VISION_KEYS.write(shape) | {
        "model_type": f"{cfg.family}_vision",
        "num_position_embeddings": shape.grid_side**2,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "axial", "rope_theta": shape.rope_theta},
        "initializer_range": cfg.initializer_range,
    }
    return keys | ({_DEEPSTACK: list(shape.deepstack_blocks)} if has_deepstack else {})


_SCRATCH_GRID_SIDE = 8


def _scratch_vision(scratch: Scratch, *, has_deepstack: bool) -> VisionShape:
    """The tower of a model from scratch; deepstack uses its first block."""
    vision = scratch.vision
    return VisionShape(
        depth=vision.depth,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        in_channels=3,
        patch_size=vision.patch_size,
        temporal_patch_size=2,
        merge_size=vision.merge_size,
        out_size=scratch.hidden_size,
        grid_side=_SCRATCH_GRID_SIDE,
        rope_theta=_ROPE_THETA,
        image_token_id=0,  # random_model sets that of the tokenizer
        deepstack_blocks=(0,) if has_deepstack else (),
    )


def _scratch_rope(scratch: Scratch, rope: Rope) -> Rope:
    """A rotation with Qwen's sections: a third of the pairs each by height, width and time."""
    pairs = int(scratch.head_dim * rope.fraction) // 2
    height, width = (pairs + 1) // 3, pairs // 3
    return replace(rope, sections=(pairs - height - width, height, width))


def with_vision(text: Family, name: str, architecture: str, *, has_deepstack: bool, **more: Any) -> Family:
    """A family of text with a vision tower."""

    def fields(hf: dict[str, Any]) -> dict[str, Any]:
        return text.fields(hf) | {"vision": _vision_shape(hf, has_deepstack=has_deepstack)}

    def scratch(section: Scratch) -> dict[str, Any]:
        return text.scratch(section) | {
            "rope": _scratch_rope(section, scratch_rope(text.rotary_fraction)),
            "vision": _scratch_vision(section, has_deepstack=has_deepstack),
        }

    def nest(flat: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
        assert cfg.vision is not None
        outer = {key: flat.pop(key) for key in ("architectures", "tie_word_embeddings")}
        return outer | {
            "model_type": name,
            "text_config": flat | {"model_type": f"{name}_text"},
            "vision_config": _vision_to_hf(cfg, has_deepstack=has_deepstack),
            "image_token_id": cfg.vision.image_token_id,
        }

    return replace(
        text,
        name=name,
        architecture=architecture,
        fields=fields,
        scratch=scratch,
        required=(*text.required, "vision_config", "image_token_id"),
        normalise=_normalise,
        nest=nest,
        text_prefix="model.language_model.",
        **more,
    )


def _moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """As qwen3_moe; gates always sum to 1, and experts are stored [experts, in, out]."""
    moe = QWEN3_MOE.fields(hf)["moe"]
    return {"moe": replace(moe, norm_topk_prob=True, is_transposed=True)}


def _scratch_moe(scratch: Scratch) -> dict[str, Any]:
    return {"moe": scratch_moe(scratch, is_transposed=True)}


_EXPERTS = tuple(
    WeightRule((path,), (path,), may_be_swapped=True)
    for path in (f"model.layers.{{layer}}.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
)
"""transformers writes experts as [experts, out, in]; the checkpoints, and vLLM, have [experts, in, out]."""

_QWEN3 = {"defaults": {"rope_theta": 500_000.0}, "rotary_sections": (24, 20, 20)}

QWEN3_VL = with_vision(
    QWEN3,
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    has_deepstack=True,
    traits=Traits(renderer="qwen3-vl", has_vision=True, vllm=VllmTraits(adapts=True), implied=QWEN3.traits.implied),
    **_QWEN3 | {"defaults": {"head_dim": 128, "rope_theta": 500_000.0}},
)

QWEN3_VL_MOE = with_vision(
    replace(QWEN3_MOE, fields=_moe_fields, scratch=_scratch_moe, weights=_EXPERTS),
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    has_deepstack=True,
    traits=Traits(
        renderer="qwen3-vl",
        has_vision=True,
        may_be_transposed=True,
        vllm=VllmTraits(adapts_experts=False),
        implied=Implied(has_qk_norm=True),
    ),
    **_QWEN3,
)
