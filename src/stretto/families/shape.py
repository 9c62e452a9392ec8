"""The shape of a network as data, from which a decoder is built.

models/config.py reads it from a Hugging Face config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings; `kind` is default, linear, llama3 or yarn.

    `factor` and the fields below it are the scaling of the other kinds.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    is_truncated: bool = True
    """True if the bounds of yarn's ramp are rounded to whole dims."""
    fraction: float = 1.0
    """Share of the dims of a head that is rotated; the others are left as they are."""
    is_interleaved: bool = False
    """True: pairs of neighbours are rotated, False: dim i with dim i + half."""
    sections: tuple[int, ...] = ()
    """In models with images: how many pairs are rotated by time, by height and by width. Beginning with the second (and
    third) pair, every third one is rotated by height (and width) until there are that many; all others by time."""


@dataclass(frozen=True)
class LayerAttention:
    """The settings of attention that may differ between layers.

    rope: None if queries and keys are not rotated. window: how many tokens a token sees, itself and those just before
    it; None: all earlier ones.
    """

    num_heads: int
    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True)
class AttentionGate:
    """Attended values are multiplied by an activation of a linear layer over the block's input.

    name: the name of that layer. is_per_head: True: one gate per head, False: one per dim of a head.
    """

    name: str
    activation: Literal["sigmoid", "softplus"]
    is_per_head: bool = False


@dataclass(frozen=True)
class ClampedGate:
    """Experts compute (up + 1) * gate * sigmoid(alpha * gate) of clamped values.

    gate is clamped to at most `limit`, up to +-`limit`.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoEShape:
    """The mixture of experts of a model; blocks not in `sparse_layers` are dense."""

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[int, ...]
    norm_topk_prob: bool = True
    """True if the gates of a token's experts are divided by their sum."""
    has_expert_bias: bool = False
    """True if a bias on the scores that choose experts (not on the gates) is moved to balance their loads."""
    is_sigmoid: bool = False
    """Scores are the sigmoid of each logit; False: the softmax of all."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen from the best `top_groups` of `num_groups` groups."""
    gate_scale: float = 1.0
    """Factor on the gates."""
    logit_cap: float | None = None
    """Logits x become cap * tanh(x / cap)."""
    has_router_bias: bool = False
    """True if the router's product has a (trained) bias."""
    shared_size: int | None = None
    """Width of the MLP that every token uses beside its experts."""
    clamped: ClampedGate | None = None
    """None: experts compute silu(gate) * up."""
    has_product_biases: bool = False
    """True if both matrices of an expert have biases."""
    is_transposed: bool = False
    """Weights of experts are [experts, in, out], as in the family's checkpoints."""
    is_interleaved: bool = False
    """Rows of gate and up alternate, instead of all of gate first."""
    has_shared_gate: bool = False
    """True if the result of the shared MLP is multiplied by the sigmoid of a gate."""
    is_plain: bool = False
    """True if experts have no gate (`ModelConfig.has_plain_mlp`)."""
    latent_size: int | None = None
    """Width of the vectors that experts compute with, projected from the residual stream; None: the stream's width."""


@dataclass(frozen=True)
class Mixer:
    """What lets the tokens of a layer see earlier ones, where that is not attention as models/decoder.py has it.

    Its code is in the package of its family, and is imported when a model or an engine is built.

    name: what estimates and conversions know it by.
    module: `package.module:Class`, built of a ModelConfig and the number of a layer.
    shape: its sizes, of a class of its own.
    keys: `package.module:Class` of an engine's cache, if that is not one of keys and values by head; a KVCache.
    states: the same of a cache of states (`States` in inference/embedded/runner.py): it passes a state from token to
        token, instead of attending to earlier tokens. Its module then has `documents`, which Decoder.documents calls.
    num_state_heads: its heads of which a rank of cp may compute some; 0 if it does not divide them.
    """

    name: str
    module: str = ""
    shape: Any = None
    keys: str | None = None
    states: str | None = None
    num_state_heads: int = 0


ATTENTION = Mixer("attention")
"""The decoder's own."""
NO_MIXER = Mixer("none")
"""A block that has an MLP only."""


@dataclass(frozen=True)
class VisionShape:
    """A vision tower (parts/vision.py), and the token that its vectors replace."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    """Patches along each side that become one token."""
    out_size: int
    grid_side: int
    """The table of learned positions is a square with sides of this many cells."""
    rope_theta: float
    image_token_id: int
    deepstack_blocks: tuple[int, ...] = ()
    """Blocks whose results the first layers of the decoder add, one block per layer."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Numbers per patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


def yarn_scale(factor: float, mscale: float) -> float:
    """The temperature of YaRN for a factor on positions, arXiv:2309.00071, section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class ModelConfig:
    """The shape and options of a decoder; `hf` is the config.json that it was read from."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    has_qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    moe: MoEShape | None = None
    layers: tuple[LayerAttention, ...] = ()
    """By layer; empty: all layers have num_heads heads, `rope`, and see all earlier tokens."""
    has_sinks: bool = False
    """True if each head has a logit that takes part in the softmax and has no value."""
    attention_gate: AttentionGate | None = None
    is_qk_norm_joint: bool = False
    """True if queries and keys are normalised over all heads together instead of each head by itself."""
    has_post_norms: bool = False
    """True if the results of attention and MLP are normalised too before they are added to the residual stream."""
    embedding_scale: float = 1.0
    """Factor on the embeddings of tokens."""
    has_centred_norms: bool = False
    """True if the weights of norms are stored as their difference from 1."""
    has_plain_mlp: bool = False
    """True if MLPs and experts have no gate: down(relu(up(x)) ** 2)."""
    mixers: tuple[Mixer, ...] = ()
    """The mixer of each layer; empty: attention in all."""
    layers_without_mlp: tuple[int, ...] = ()
    vision: VisionShape | None = None
    """None: a model of text."""
    initializer_range: float = 0.02
    hf: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def has_plain_attention(self) -> bool:
        """True if every layer attends to all earlier tokens, with whole heads rotated by halves."""
        is_rotated_by_halves = self.rope.fraction == 1.0 and not self.rope.is_interleaved
        return is_rotated_by_halves and not self.is_attention_varied and not self.mixers

    @property
    def is_attention_varied(self) -> bool:
        """True if attention is not only normalised, rotated queries and keys, alike in all layers."""
        return bool(self.layers) or self.has_sinks or self.attention_gate is not None or self.is_qk_norm_joint

    @property
    def window(self) -> int | None:
        """The window of the layers that have one; None if no layer has."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations of the layers, each once."""
        ropes = [layer.rope for layer in self.layers] if self.layers else [self.rope]
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def layer_types(self) -> list[str]:
        """The kinds of attention by layer, as config.json names them."""
        names = {True: "full_attention", False: "sliding_attention"}
        return [names[self.attention(layer).window is None] for layer in range(self.num_layers)]

    def attention(self, layer: int) -> LayerAttention:
        """The attention of a layer."""
        return self.layers[layer] if self.layers else LayerAttention(self.num_heads, self.rope)

    @property
    def num_prediction_layers(self) -> int:
        """Number of a checkpoint's layers for multi-token prediction, which the network lacks."""
        keys = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
        return next((self.hf[key] for key in keys if self.hf.get(key)), 0)

    @property
    def num_experts(self) -> int:
        """Experts of a mixture; 0 for a dense model."""
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def num_state_heads(self) -> int:
        """Heads of the mixers of which ranks of cp may compute some each; 0 if there are none."""
        return next((mixer.num_state_heads for mixer in self.mixers if mixer.num_state_heads), 0)

    @property
    def state_cache(self) -> str | None:
        """The engine's cache of states, `module:name`; None if no layer passes a state from token to token."""
        return next((mixer.states for mixer in self.mixers if mixer.states), None)

    @property
    def key_cache(self) -> str | None:
        """The engine's cache of keys, `module:name`; None: one of keys and values."""
        return next((mixer.keys for mixer in self.mixers if mixer.keys), None)

    @property
    def has_recurrence(self) -> bool:
        """True if a layer passes a state from token to token instead of attending to earlier tokens."""
        return self.state_cache is not None

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """The layers whose mixer reads keys and values of earlier tokens."""
        by_layer = ((layer, self.mixer_of(layer)) for layer in range(self.num_layers))
        return tuple(layer for layer, mixer in by_layer if not mixer.states and mixer != NO_MIXER)

    def mixer_of(self, layer: int) -> Mixer:
        """The mixer of a layer."""
        return self.mixers[layer] if self.mixers else ATTENTION

    def shape_of(self, name: str) -> Any:
        """The sizes of the mixers with this name; None if there are none."""
        return next((mixer.shape for mixer in self.mixers if mixer.name == name), None)

    def is_sparse(self, layer: int) -> bool:
        """True for a block with a mixture of experts instead of an MLP."""
        return self.moe is not None and layer in self.moe.sparse_layers
