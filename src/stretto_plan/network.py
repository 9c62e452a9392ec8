"""The size of a network by the parts that a mesh cuts: weights, operations, cache and kept activations per token.

In: a `ModelConfig`. Out: numbers of weights, operations and cached values; setup.py divides them among ranks, memory.py
and costs.py turn them into bytes and seconds. The counts of weights are those of the modules
(tests/addons/plan/test_network.py builds every family and compares).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from stretto.families.shape import Mixer, ModelConfig


@dataclass(frozen=True)
class LayerSize:
    """Numbers of weights of one block."""

    mixer: int
    """Projections of attention or of a recurrent mixer; tp cuts them."""
    dense: int
    """MLP, or the expert that every token of a mixture uses; tp cuts it."""
    experts: int
    """All routed experts; ep cuts them."""
    small: int
    """Norms and routers, which every rank of tp and ep has whole."""
    frozen: int = 0
    """Weights without gradients: indexers and biases on the choice of experts."""
    share_of_experts: float = 0.0
    """Part of the experts that compute one token."""

    @property
    def total(self) -> int:
        return self.mixer + self.dense + self.experts + self.small + self.frozen

    @property
    def active(self) -> float:
        """Weights that compute one token."""
        return self.total - self.experts * (1 - self.share_of_experts)


@dataclass(frozen=True)
class NetworkSize:
    """Numbers of weights, and what is kept and computed per token."""

    shape: ModelConfig
    layers: tuple[LayerSize, ...]
    embedding: int
    head: int
    """0 if the head and the embedding share their weights."""
    vision: int

    @classmethod
    def of(cls, cfg: ModelConfig) -> NetworkSize:
        layers = tuple(_layer(cfg, layer) for layer in range(cfg.num_layers))
        embedding = cfg.vocab_size * cfg.hidden_size
        return cls(cfg, layers, embedding, 0 if cfg.tie_word_embeddings else embedding, _vision(cfg))

    @cached_property
    def total(self) -> int:
        """All weights of the network."""
        return sum(layer.total for layer in self.layers) + self.outside

    @property
    def outside(self) -> int:
        """Weights outside the blocks."""
        return self.embedding + self.head + self.shape.hidden_size + self.vision

    @cached_property
    def experts(self) -> int:
        """All routed experts of all blocks."""
        return sum(layer.experts for layer in self.layers)

    @cached_property
    def frozen(self) -> int:
        """Weights without gradients, whatever the config freezes besides."""
        return sum(layer.frozen for layer in self.layers)

    @cached_property
    def active(self) -> float:
        """Weights that one token is multiplied by, so without the lookup of its embedding."""
        head = self.shape.vocab_size * self.shape.hidden_size
        return sum(layer.active for layer in self.layers) + head

    # -- attention --

    def attention_ops(self, queries: float, keys: float) -> float:
        """Operations of attention (scores and weighted values) in all layers; a query sees `keys` keys on average."""
        return queries * sum(ops * min(keys, most) for most, ops in self._ops_per_key.items())

    @cached_property
    def _ops_per_key(self) -> dict[float, float]:
        """Operations of one query for one key it sees, over the layers in which it sees at most so many keys."""
        cfg, found = self.shape, defaultdict[float, float](float)
        latent = cfg.shape_of("latent")
        for layer in cfg.attending_layers:
            window: float = cfg.attention(layer).window or math.inf
            if latent is None:
                found[window] += 4.0 * cfg.attention(layer).num_heads * cfg.head_dim
                continue
            indexer = latent.indexer
            if indexer is None:
                widths = latent.plain_dim + latent.rotated_dim + latent.value_dim
                found[window] += 2.0 * cfg.num_heads * widths
                continue
            chosen = min(window, indexer.top_k)
            found[chosen] += 2.0 * cfg.num_heads * (2 * latent.rank + latent.rotated_dim)
            if indexer.sources[layer] == layer:
                found[window] += 2.0 * indexer.num_heads * indexer.head_dim
        return dict(found)

    def cache_values(self, *, is_expanded: bool) -> float:
        """Values that an engine caches per token, in layers without a window.

        is_expanded: latent attention caches keys and values of all heads (the embedded engine), not the small vectors
        (vLLM).
        """
        return self._cache_values[is_expanded]

    @cached_property
    def _cache_values(self) -> dict[bool, float]:
        return {is_expanded: self._count_cache_values(is_expanded) for is_expanded in (False, True)}

    def _count_cache_values(self, is_expanded: bool) -> float:
        cfg, values = self.shape, 0.0
        latent = cfg.shape_of("latent")
        for layer in cfg.attending_layers:
            if latent is None:
                values += 2 * cfg.num_kv_heads * cfg.head_dim
                continue
            if is_expanded:
                values += 2 * cfg.num_heads * (latent.plain_dim + latent.rotated_dim)
                continue
            values += latent.rank + latent.rotated_dim
            if latent.indexer is not None and latent.indexer.sources[layer] == layer:
                values += latent.indexer.head_dim
        return values

    @cached_property
    def state_values(self) -> tuple[int, int]:
        """Values that recurrent layers keep per sequence of any length: latest inputs, and float32 states."""
        recent = state = 0
        for layer in range(self.shape.num_layers):
            own = _state_values(self.shape.mixer_of(layer))
            recent, state = recent + own[0], state + own[1]
        return recent, state


# -- weights of a block --


def _layer(cfg: ModelConfig, layer: int) -> LayerSize:
    kind, width = cfg.mixer_of(layer).name, cfg.hidden_size
    mixer, small, frozen = _mixer(cfg, layer, kind)
    small += width * (kind != "none")
    dense, experts, share = 0, 0, 0.0
    if layer not in cfg.layers_without_mlp:
        small += width
        if cfg.is_sparse(layer):
            moe = cfg.moe
            assert moe is not None
            inner = moe.latent_size or width
            experts = _experts(cfg, inner)
            share = moe.top_k / moe.num_experts
            small += moe.num_experts * (width + moe.has_router_bias) + width * moe.has_shared_gate
            frozen += moe.num_experts * moe.has_expert_bias
            if moe.shared_size is not None:
                dense += _mlp(width, moe.shared_size, is_plain=moe.is_plain, has_bias=cfg.mlp_bias)
            if moe.latent_size is not None:
                dense += 2 * width * inner + (width + inner) * cfg.mlp_bias
        else:
            dense = _mlp(width, cfg.intermediate_size, is_plain=cfg.has_plain_mlp, has_bias=cfg.mlp_bias)
    small += 2 * width * cfg.has_post_norms
    return LayerSize(mixer, dense, experts, small, frozen, share)


def _mlp(width: int, inner: int, *, is_plain: bool, has_bias: bool) -> int:
    num_up = 1 if is_plain else 2
    return (num_up + 1) * width * inner + (num_up * inner + width) * has_bias


def _experts(cfg: ModelConfig, width: int) -> int:
    moe = cfg.moe
    assert moe is not None
    return moe.num_experts * _mlp(width, moe.intermediate_size, is_plain=moe.is_plain, has_bias=moe.has_product_biases)


def _mixer(cfg: ModelConfig, layer: int, kind: str) -> tuple[int, int, int]:
    """Weights of projections, of small vectors, and those without gradients."""
    if kind == "none":
        return 0, 0, 0
    if kind == "gated_delta":
        return _gated_delta(cfg, layer)
    if kind == "mamba":
        return _mamba(cfg, layer)
    if kind == "latent":
        return _latent(cfg, layer)
    width, heads = cfg.hidden_size, cfg.attention(layer).num_heads
    q, kv = heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    q_out = 2 * q if kind == "paired" else q
    found = width * (q_out + 2 * kv + q) + (q_out + 2 * kv) * cfg.qkv_bias + width * cfg.out_bias
    small = heads * cfg.has_sinks
    if cfg.has_qk_norm:
        small += q + kv if cfg.is_qk_norm_joint else 2 * cfg.head_dim
    if cfg.attention_gate is not None and kind != "paired":
        found += width * (heads if cfg.attention_gate.is_per_head else q)
    return found, small, 0


def _latent(cfg: ModelConfig, layer: int) -> tuple[int, int, int]:
    latent, width = cfg.mixer_of(layer).shape, cfg.hidden_size
    q = cfg.num_heads * (latent.plain_dim + latent.rotated_dim)
    rank, small = latent.query_rank, latent.rank
    found = width * q if rank is None else (width + q) * rank + rank * cfg.qkv_bias
    found += (width + cfg.qkv_bias) * (latent.rank + latent.rotated_dim)
    found += latent.rank * cfg.num_heads * (latent.plain_dim + latent.value_dim)
    found += cfg.num_heads * latent.value_dim * width + width * cfg.out_bias
    indexer, frozen = latent.indexer, 0
    if indexer is not None and indexer.sources[layer] == layer:
        frozen = (rank or 0) * indexer.num_heads * indexer.head_dim
        frozen += width * (indexer.head_dim + indexer.num_heads) + 2 * indexer.head_dim
    return found, small + (rank or 0), frozen


def _gated_delta(cfg: ModelConfig, layer: int) -> tuple[int, int, int]:
    delta, width = cfg.mixer_of(layer).shape, cfg.hidden_size
    values = delta.num_value_heads * delta.value_head_dim
    channels = 2 * delta.num_key_heads * delta.key_head_dim + values
    found = width * (channels + 2 * values + 2 * delta.num_value_heads)
    return found, channels * delta.conv_width + 2 * delta.num_value_heads + delta.value_head_dim, 0


def _mamba(cfg: ModelConfig, layer: int) -> tuple[int, int, int]:
    mamba, width = cfg.mixer_of(layer).shape, cfg.hidden_size
    size = mamba.num_heads * mamba.head_dim
    channels = size + 2 * mamba.num_groups * mamba.state_dim
    out = size + channels + mamba.num_heads
    found = width * (out + size) + (out + width) * mamba.has_bias
    small = channels * (mamba.conv_width + mamba.has_conv_bias) + 3 * mamba.num_heads + size
    return found, small, 0


def _state_values(mixer: Mixer) -> tuple[int, int]:
    """Latest inputs of the convolution of one recurrent layer, and its state."""
    if mixer.name == "gated_delta":
        delta = mixer.shape
        state = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
        channels = 2 * delta.num_key_heads * delta.key_head_dim + delta.num_value_heads * delta.value_head_dim
        return (delta.conv_width - 1) * channels, state
    if mixer.name == "mamba":
        mamba = mixer.shape
        channels = mamba.num_heads * mamba.head_dim + 2 * mamba.num_groups * mamba.state_dim
        return (mamba.conv_width - 1) * channels, mamba.num_heads * mamba.head_dim * mamba.state_dim
    return 0, 0


def _vision(cfg: ModelConfig) -> int:
    """The tower: patches, positions, blocks, and the mergers."""
    shape = cfg.vision
    if shape is None:
        return 0
    width, merged = shape.hidden_size, shape.hidden_size * shape.merge_size**2
    block = 4 * width * width + 4 * width + 2 * width * shape.intermediate_size
    block += shape.intermediate_size + width + 4 * width
    merger = merged * merged + merged + merged * shape.out_size + shape.out_size
    mergers = merger + 2 * width + len(shape.deepstack_blocks) * (merger + 2 * merged)
    patches = shape.patch_values * width + width
    return patches + shape.grid_side**2 * width + shape.depth * block + mergers
