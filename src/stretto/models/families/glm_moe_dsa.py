"""glm_moe_dsa (GLM-5) and deepseek_v32 (DeepSeek V3.2): deepseek_v3 with attention to the keys that an indexer chooses.

They differ in how the indexer's vectors are rotated, and in that layers of glm_moe_dsa may share the choice of a layer
before them (`indexer_types`, or the older `index_topk_pattern`, `index_topk_freq`, `index_skip_topk_offset`). Layers
for multi-token prediction are not read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stretto.base.errors import DataError
from stretto.models.families import deepseek_v3
from stretto.models.family import EXPERT_BIAS, STACKED_EXPERTS, Family
from stretto.models.shape import IndexerShape, ModelConfig

if TYPE_CHECKING:
    from stretto.config.sections.model import ScratchSection

_REQUIRED = (*deepseek_v3.REQUIRED, "q_lora_rank")
_FIXED_VALUES = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
_LETTERS = {"F": "full", "S": "shared"}


def _indexer_types(hf: dict[str, Any]) -> list[str]:
    """By layer: full, if it has an indexer, or shared."""
    if (types := hf.get("indexer_types")) is not None:
        return list(types)
    if (pattern := hf.get("index_topk_pattern")) is not None:
        return [_LETTERS.get(name, name) for name in pattern]
    freq, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
    return [
        "shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(hf["num_hidden_layers"])
    ]


def _sources(types: list[str], num_layers: int, family: str) -> tuple[int, ...]:
    """By layer: the layer whose indexer chooses its keys.

    Raises: DataError for a layer that has none before it.
    """
    if len(types) != num_layers or set(types) - {"full", "shared"}:
        raise DataError(
            f'{family}: indexer_types must be "full" or "shared" for each of the {num_layers} layers, not {types}'
        )
    if types[0] == "shared":
        raise DataError(
            f"{family}: indexer_types of layer 0 is shared, but no layer before it has a choice to share"
        )
    sources: list[int] = []
    for layer, kind in enumerate(types):
        sources.append(layer if kind == "full" else sources[-1])
    return tuple(sources)


def _sparse_layers(hf: dict[str, Any], family: str) -> tuple[int, ...]:
    count, types = hf["num_hidden_layers"], hf.get("mlp_layer_types")
    if types is None:
        return tuple(range(min(hf.get("first_k_dense_replace", 3), count), count))
    if len(types) != count or set(types) - {"dense", "sparse"}:
        raise DataError(
            f'{family}: mlp_layer_types must be "dense" or "sparse" for each of the {count} layers, not {types}'
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")


def _fields_of(family: str, heads: int, *, is_interleaved: bool) -> Any:
    def fields(hf: dict[str, Any]) -> dict[str, Any]:
        found, count = deepseek_v3.fields(hf), hf["num_hidden_layers"]
        types = _indexer_types(hf) if family == "glm_moe_dsa" else ["full"] * count
        indexer = IndexerShape(
            num_heads=hf.get("index_n_heads", heads),
            head_dim=hf.get("index_head_dim", 128),
            top_k=hf.get("index_topk", 2048),
            is_interleaved=is_interleaved,
            sources=_sources(types, count, family),
        )
        if indexer.head_dim < found["latent"].rotated_dim or indexer.top_k < 1:
            raise DataError(
                f"{family}: index_head_dim = {indexer.head_dim} must be at least qk_rope_head_dim = "
                f"{found['latent'].rotated_dim}, and index_topk = {indexer.top_k} at least 1"
            )
        return found | {
            "mixers": ("sparse_latent",) * count,
            "latent": replace(found["latent"], indexer=indexer),
            "moe": replace(found["moe"], sparse_layers=_sparse_layers(hf, family)),
        }

    return fields


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse, with the layers one by one."""
    assert cfg.latent is not None and cfg.latent.indexer is not None
    indexer = cfg.latent.indexer
    found = {
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        "mlp_layer_types": ["sparse" if cfg.is_sparse(layer) else "dense" for layer in range(cfg.num_layers)],
    }
    if cfg.family == "glm_moe_dsa":
        found["indexer_types"] = [
            "full" if source == layer else "shared" for layer, source in enumerate(indexer.sources)
        ]
    return deepseek_v3.to_hf(cfg) | found


def _scratch(scratch: ScratchSection, *, is_shared: bool, is_interleaved: bool) -> dict[str, Any]:
    """deepseek_v3 with an indexer in every layer, or in every second one, whose choice the next one shares."""
    found = deepseek_v3.scratch(scratch)
    indexer = IndexerShape(
        num_heads=scratch.num_heads,
        head_dim=scratch.head_dim,
        top_k=scratch.index_topk,
        is_interleaved=is_interleaved,
        sources=tuple(layer - layer % 2 if is_shared else layer for layer in range(scratch.num_layers)),
    )
    return found | {
        "mixers": ("sparse_latent",) * scratch.num_layers,
        "latent": replace(found["latent"], indexer=indexer),
    }


def _family(name: str, architecture: str, heads: int, *, is_interleaved: bool, **defaults: Any) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        fields=_fields_of(name, heads, is_interleaved=is_interleaved),
        to_hf=_to_hf,
        required=_REQUIRED,
        defaults={"routed_scaling_factor": 2.5} | defaults,
        fixed_values=_FIXED_VALUES | {"indexer_rope_interleave": is_interleaved},
        key_aliases=deepseek_v3.DEEPSEEK_V3.key_aliases,
        normalise=deepseek_v3.normalise,
        layer_types=("indexed_attention",),
        weights=(*STACKED_EXPERTS, EXPERT_BIAS),
        rotary_fraction=1.0,
        is_rotary_interleaved=True,
        scratch=partial(_scratch, is_shared=name == "glm_moe_dsa", is_interleaved=is_interleaved),
    )


GLM_MOE_DSA = _family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    32,
    is_interleaved=True,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-5,
)
DEEPSEEK_V32 = _family(
    "deepseek_v32", "DeepseekV32ForCausalLM", 64, is_interleaved=False, n_group=8, topk_group=4
)
