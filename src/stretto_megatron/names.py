"""Where our parameters are in a checkpoint of Megatron-Core.

Our parameters have the same names in every family, so one table serves all: it is a `TensorMap` whose checkpoint
tensors are Megatron's, with the number of the layer in their names. Queries, keys and values are one matrix there, in
which each group of query heads is followed by its key head and its value head; gate and up are one matrix, gate first.

Source: Megatron-Core 0.19 (transformer/attention.py `get_query_key_value_tensors`, transformer/mlp.py), names as its
`sharded_state_dict` writes them with Transformer Engine's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from stretto.base.errors import DataError
from stretto.families.shape import ModelConfig
from stretto.models.decoder import Decoder
from stretto.models.tensor_map import Shape, SharedSlice, TensorMap

_WHOLE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_INDEXER = "self_attention.core_attention.indexer."
_IN_LAYERS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",  # latent attention without a rank for queries
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.indexer.wq_b.weight": f"{_INDEXER}linear_wq_b.weight",
    "self_attn.indexer.wk.weight": f"{_INDEXER}linear_wk.weight",
    "self_attn.indexer.k_norm.weight": f"{_INDEXER}k_norm.weight",
    "self_attn.indexer.k_norm.bias": f"{_INDEXER}k_norm.bias",
    "self_attn.indexer.weights_proj.weight": f"{_INDEXER}linear_weights_proj.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "post_self_attn_layernorm.weight": "post_self_attn_layernorm.weight",
    "post_mlp_layernorm.weight": "post_mlp_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.gate.expert_bias": "mlp.router.expert_bias",
    "mlp.experts.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.gate_up_proj_bias": "mlp.experts.experts.linear_fc1.bias",
    "mlp.experts.down_proj": "mlp.experts.experts.linear_fc2.weight",
    "mlp.experts.down_proj_bias": "mlp.experts.experts.linear_fc2.bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}
"""Ours -> theirs below `model.layers.N.` and `decoder.layers.N.`, where both are the same matrix."""
_ABOVE_EXPERTS, _BEFORE_LATENT = "pre_mlp_layernorm.weight", "input_layernorm.weight"
"""Norms that Transformer Engine does not fuse with the matrix after them: of experts and of latent attention."""
ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": (_BEFORE_LATENT,),
    _BEFORE_LATENT: ("self_attention.linear_qkv.layer_norm_weight",),
    "mlp.linear_fc1.layer_norm_weight": (_ABOVE_EXPERTS,),
    _ABOVE_EXPERTS: ("mlp.linear_fc1.layer_norm_weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attention.q_layernorm.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attention.kv_layernorm.weight",),
}
"""Other names of the same tensor, which Megatron's own layers have; a checkpoint is written with all of them."""
OTHERWISE = "give its Hugging Face weights"
LAYERS, EXPERTS = "decoder.layers.", "mlp.experts.experts."
_MODULES_OF_ENGINE = ("linear_", "layernorm", "output_layer")
"""Modules of Transformer Engine, which ask a checkpoint for a state beside their weights."""


def megatron_map(cfg: ModelConfig, where: str, *, shapes: Mapping[str, Shape] | None = None) -> TensorMap:
    """The slices that a model's parameters share with Megatron's tensors.

    shapes: those of our parameters; None: as cfg says.

    Raises: DataError for a model that has parts without a place there.
    """
    parts = {
        "a vision tower": cfg.vision is not None,
        "recurrent layers": cfg.has_recurrence,
        "another attention": any(mixer.name != "latent" for mixer in cfg.mixers),
    }
    if there := [part for part, is_there in parts.items() if is_there]:
        raise DataError(
            f"{where}: Megatron's checkpoints of a {cfg.family} cannot be read, for it has {there[0]}; {OTHERWISE}"
        )
    if shapes is None:
        with torch.device("meta"):
            shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(cfg).named_parameters()}
    slices: list[SharedSlice] = []
    for name, shape in shapes.items():
        if (found := list(_slices(cfg, name, shape, shapes))) == []:
            raise DataError(f"{where}: Megatron's checkpoints have no known place for {name} of a {cfg.family}")
        slices += found
    return TensorMap.of(shapes, slices)


def _slices(cfg: ModelConfig, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Iterator[SharedSlice]:
    if name in _WHOLE:
        yield _part(name, _WHOLE[name], shape)
        return
    _, _, layer, part = name.split(".", 3)
    inner, kind = part.rsplit(".", 1) if "." in part else (part, "")
    their = f"{LAYERS}{layer}."
    is_latent = cfg.mixer_of(int(layer)).name == "latent"
    if inner in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") and not is_latent:
        yield from _by_group(cfg, name, shape, f"{their}self_attention.linear_qkv.{kind}", int(layer))
        return
    for mlp in ("mlp", "mlp.shared_experts"):
        if inner in (f"{mlp}.gate_proj", f"{mlp}.up_proj"):
            start = 0 if inner.endswith("gate_proj") else shapes[name.replace("up_proj", "gate_proj")][0]
            yield _part(name, f"{their}{mlp}.linear_fc1.{kind}", shape, their_row=start)
            return
    if part == "input_layernorm.weight" and is_latent:
        yield _part(name, their + _BEFORE_LATENT, shape)
    elif part == "post_attention_layernorm.weight" and cfg.is_sparse(int(layer)):
        yield _part(name, their + _ABOVE_EXPERTS, shape)
    elif part in _IN_LAYERS:
        yield _part(name, their + _IN_LAYERS[part], shape)


def expert_order(cfg: ModelConfig, name: str) -> tuple[bool, bool]:
    """How our stacked experts lie otherwise than Megatron's of this name.

    Returns: whether rows and columns are swapped, and whether rows of gate and up come in turn (there gate is first).
    """
    if cfg.moe is None or EXPERTS not in name:
        return False, False
    is_weight = name.endswith("weight")
    return cfg.moe.is_transposed and is_weight, cfg.moe.is_interleaved and "linear_fc1" in name


def _by_group(cfg: ModelConfig, name: str, shape: Shape, theirs: str, layer: int) -> Iterator[SharedSlice]:
    """The heads of queries, keys or values in the matrix of all three."""
    heads, groups, dim = cfg.attention(layer).num_heads, cfg.num_kv_heads, cfg.head_dim
    per_group = heads // groups
    first, count = {"q": (0, per_group), "k": (per_group, 1), "v": (per_group + 1, 1)}[name.split(".")[4][0]]
    for group in range(groups):
        their_row = (group * (per_group + 2) + first) * dim
        yield _part(name, theirs, (count * dim, *shape[1:]), row=group * count * dim, their_row=their_row)


def _part(name: str, theirs: str, shape: Shape, *, row: int = 0, their_row: int = 0) -> SharedSlice:
    rest = (0,) * (len(shape) - 1)
    return SharedSlice(name, (row, *rest), shape, theirs, (their_row, *rest), 0)


def extra_states(names: Iterable[str], num_experts: int) -> Iterator[tuple[str, int]]:
    """The modules of these weights that have a state of their own in a checkpoint, each with its number of parts."""
    seen: set[str] = set()
    for name in names:
        module = name.rpartition(".")[0]
        if module in seen or not any(part in module for part in _MODULES_OF_ENGINE):
            continue
        seen.add(module)
        yield f"{module}._extra_state", num_experts if EXPERTS in name else 1
        if module.endswith("linear_proj"):
            yield f"{module.removesuffix('linear_proj')}core_attention._extra_state", 1


def spellings(name: str) -> Iterator[str]:
    """A name, and the others that mean the same."""
    yield name
    if name.startswith(LAYERS):
        layer, part = name.removeprefix(LAYERS).split(".", 1)
        yield from (f"{LAYERS}{layer}.{each}" for each in ALIASES.get(part, ()))
