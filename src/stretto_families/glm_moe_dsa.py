"""glm_moe_dsa (GLM-5), deepseek_v32 (DeepSeek V3.2): deepseek_v3 with an indexer.

Queries attend to the keys that the indexer chooses. The two differ in how the indexer's vectors are rotated, and in
that layers of glm_moe_dsa may share the choice of a layer before them (`indexer_types`, or the older
`index_topk_pattern`, `index_topk_freq`, `index_skip_topk_offset`). Layers for multi-token prediction are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.base.errors import DataError
from stretto.families.family import Family, Keys, Scratch, mlp_layer_types, scratch_shared_moe, sparse_layers
from stretto.families.own.glm4_moe import read_mixture
from stretto.families.shape import ModelConfig
from stretto.families.traits import Implied, Traits, VllmTraits
from stretto_families import deepseek_v3
from stretto_families.deepseek_v3 import read_latent, scratch_latent
from stretto_families.shapes import IndexerShape, latent

_INDEXER_KEYS = Keys(num_heads="index_n_heads", head_dim=("index_head_dim", 128), top_k=("index_topk", 2048))
"""Fields of IndexerShape and their keys in config.json."""
_LETTERS = {"F": "full", "S": "shared"}


def _indexer_types(hf: dict[str, Any]) -> list[str]:
    """By layer: full, if it has an indexer, or shared."""
    if (types := hf.get("indexer_types")) is not None:
        return list(types)
    if (pattern := hf.get("index_topk_pattern")) is not None:
        return [_LETTERS.get(name, name) for name in pattern]
    freq, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
    return ["shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(hf["num_hidden_layers"])]


def _sources(types: list[str], num_layers: int, family: str) -> tuple[int, ...]:
    """By layer: the layer whose indexer chooses its keys.

    Raises: DataError for a layer that has none before it.
    """
    if len(types) != num_layers or set(types) - {"full", "shared"}:
        raise DataError(
            f'{family}: indexer_types must be "full" or "shared" for each of the {num_layers} layers, not {types}'
        )
    if types[0] == "shared":
        raise DataError(f"{family}: indexer_types of layer 0 is shared, but no layer before it has a choice to share")
    sources: list[int] = []
    for layer, kind in enumerate(types):
        sources.append(layer if kind == "full" else sources[-1])
    return tuple(sources)


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `fields`, with the layers one by one."""
    indexer = deepseek_v3.shape_of(cfg).indexer
    assert indexer is not None
    keys = _INDEXER_KEYS.write(indexer) | {"mlp_layer_types": mlp_layer_types(cfg)}
    if cfg.family == "glm_moe_dsa":
        keys["indexer_types"] = [
            "full" if source == layer else "shared" for layer, source in enumerate(indexer.sources)
        ]
    return deepseek_v3.to_hf(cfg) | keys


def _family(name: str, architecture: str, *, is_interleaved: bool, traits: Traits, **defaults: Any) -> Family:
    """A family with an indexer; is_interleaved: how the indexer's vectors are rotated."""
    has_shared = name == "glm_moe_dsa"

    def fields(hf: dict[str, Any]) -> dict[str, Any]:
        base, count = read_latent(hf), hf["num_hidden_layers"]
        indexer = IndexerShape(
            **_INDEXER_KEYS.read(hf),
            is_interleaved=is_interleaved,
            sources=_sources(_indexer_types(hf) if has_shared else ["full"] * count, count, name),
        )
        if indexer.head_dim < base.rotated_dim or indexer.top_k < 1:
            raise DataError(
                f"{name}: index_head_dim = {indexer.head_dim} must be at least qk_rope_head_dim = "
                f"{base.rotated_dim}, and index_topk = {indexer.top_k} at least 1"
            )
        return {
            "mixers": (latent(replace(base, indexer=indexer)),) * count,
            "moe": replace(read_mixture(hf, 3), sparse_layers=sparse_layers(hf, hf.get("first_k_dense_replace", 3))),
        }

    def scratch(section: Scratch) -> dict[str, Any]:
        """deepseek_v3 with an indexer in every layer, or in every second one if choices are shared."""
        indexer = IndexerShape(
            num_heads=section.num_heads,
            head_dim=section.head_dim,
            top_k=section.index_topk,
            is_interleaved=is_interleaved,
            sources=tuple(layer - layer % 2 if has_shared else layer for layer in range(section.num_layers)),
        )
        mixer = latent(replace(scratch_latent(section), indexer=indexer))
        return {"mixers": (mixer,) * section.num_layers, "moe": scratch_shared_moe(section, 1)}

    return replace(
        deepseek_v3.DEEPSEEK_V3,
        name=name,
        traits=traits,
        architecture=architecture,
        fields=fields,
        to_hf=_to_hf,
        required=(*deepseek_v3.REQUIRED, "q_lora_rank"),
        defaults={"routed_scaling_factor": 2.5} | defaults,
        fixed_values=deepseek_v3.FIXED_VALUES | {"indexer_rope_interleave": is_interleaved},
        layer_types=("indexed_attention",),
        scratch=scratch,
    )


_GLM_5: dict[str, Any] = {
    "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 2048,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
    "first_k_dense_replace": 3, "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
"""Source: the defaults of transformers' GlmMoeDsaConfig, and the model's card."""

GLM_MOE_DSA = _family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    is_interleaved=True,
    traits=Traits(
        renderer="glm-5",
        uncut=deepseek_v3.UNCUT,
        chooses_keys=True,
        packs_in_transformers=True,
        vllm=VllmTraits(prediction_key="num_nextn_predict_layers"),
        implied=Implied(expert_scores="sigmoid", has_shared_gate=False),
        public={
            "zai-org/GLM-5": _GLM_5,
            "zai-org/GLM-5.1": _GLM_5,
            "zai-org/GLM-5-FP8": _GLM_5 | {"quantization_config": {"quant_method": "fp8"}},
        },
    ),
    index_n_heads=32,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-5,
)
DEEPSEEK_V32 = _family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    is_interleaved=False,
    traits=Traits(
        uncut=deepseek_v3.UNCUT, chooses_keys=True, vllm=VllmTraits(prediction_key="num_nextn_predict_layers")
    ),
    index_n_heads=64,
    n_group=8,
    topk_group=4,
)
