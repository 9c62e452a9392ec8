"""The mixers of our families as data: their sizes, and where their code is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.families.shape import Mixer, yarn_scale

_MIXERS, _CACHES = "stretto_families.mixers", "stretto_families.caches"
_STATES = f"{_CACHES}.states:StateCache"
PAIRED = Mixer("paired", f"{_MIXERS}.paired:PairedAttention")
"""Attention with a gate in q_proj."""


def gated_delta(shape: GatedDeltaShape) -> Mixer:
    """The gated delta rule."""
    heads = math.gcd(shape.num_key_heads, shape.num_value_heads)
    module = f"{_MIXERS}.gated_delta:GatedDelta"
    return Mixer("gated_delta", module, shape, states=_STATES, num_state_heads=heads)


def mamba(shape: MambaShape) -> Mixer:
    """Mamba 2."""
    return Mixer("mamba", f"{_MIXERS}.mamba2:Mamba2", shape, states=_STATES)


def latent(shape: LatentShape) -> Mixer:
    """Latent attention, to all earlier tokens, or to those that an indexer chooses."""
    if shape.indexer is None:
        return Mixer("latent", f"{_MIXERS}.mla:LatentAttention", shape)
    module, keys = f"{_MIXERS}.sparse_mla:SparseLatentAttention", f"{_CACHES}.chosen_keys:ChosenKeyCache"
    return Mixer("latent", module, shape, keys=keys)


@dataclass(frozen=True)
class GatedDeltaShape:
    """The heads of mixers by the gated delta rule (mixers/gated_delta.py)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int


@dataclass(frozen=True)
class MambaShape:
    """The heads of Mamba 2 mixers (mixers/mamba2.py)."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    min_step: float
    """The smallest step size of a token."""
    has_bias: bool = False
    has_conv_bias: bool = True


@dataclass(frozen=True)
class IndexerShape:
    """The indexer that chooses the keys of latent attention (mixers/sparse_mla.py)."""

    num_heads: int
    head_dim: int
    top_k: int
    """The most keys that a query attends to."""
    is_interleaved: bool
    """True if neighbouring dims of its vectors are rotated (`Rope.is_interleaved`)."""
    sources: tuple[int, ...]
    """For each layer, the layer whose indexer chooses its keys: itself, if it has an indexer."""


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (mixers/mla.py)."""

    query_rank: int | None
    """Width of the vector that queries are expanded from; None: queries are projected directly."""
    rank: int
    """Width of the vector that keys and values are expanded from."""
    plain_dim: int
    rotated_dim: int
    """Dims of a query and key that are not rotated, and dims after them that are."""
    value_dim: int
    yarn_mscale: float = 0.0
    """`mscale_all_dim` of a YaRN checkpoint."""
    yarn_factor: float = 1.0
    indexer: IndexerShape | None = None
    """None: queries attend to all earlier tokens."""

    @property
    def query_factor(self) -> float:
        """Factor on queries beside head_dim ** -0.5; see DeepSeek-V3's config.json."""
        return yarn_scale(self.yarn_factor, self.yarn_mscale) ** 2
