"""What a forward pass keeps for the backward pass, in numbers per token of a block; and what a backward pass adds.

The counts follow the operations of our modules (models/decoder.py, moe.py, parts/): the inputs of products, of norms
and of gates, and what attention saves. With kernels in C (float32 on a CPU) nothing else is saved; without them a few
results are kept twice. Tested against torch's allocator on dense models and mixtures; recurrent and latent mixers are
counted in the same way and were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stretto.config.sections.model import ActivationCheckpointSection
from stretto.families.shape import ModelConfig

INDEX_BYTES = 4.0
"""Size of the index of one chosen key of one query of a mixer."""


class Moment(NamedTuple):
    """A moment of a block's backward pass. Shares are of the weights of its MLP and experts."""

    values: float
    """Gradients of activations, less the activations that are not needed any more; numbers per token."""
    grads: float
    """Gradients of weights there are."""
    fresh: float
    """The part of `grads` whose product is being computed: with several rows it is added to older gradients."""


@dataclass(frozen=True)
class BlockActivations:
    """Numbers per token that a block keeps, by the part that can be computed again; and what its backward pass adds."""

    residual: float
    """The block's input, and the residual stream between its halves."""
    norm: float
    """Results of the norms, the inputs of the products after them."""
    attn_proj: float
    """Between the normalised input and queries, keys and values."""
    attention: float
    mlp: float
    experts: float
    router: float
    """Scores, gates, copies of tokens for their experts and back."""
    choice_bytes: float
    """Bytes per token that are kept whatever is computed again: the keys that an indexer chose."""
    forward: float
    """What its forward pass holds at its end besides, and drops."""
    backward: tuple[Moment, ...]
    """The moments of its backward pass at which most is held."""
    width: float
    """The residual stream: what is kept of a block that is computed again."""
    gathered: float
    """The part of all tokens that other ranks of tp have: a projection or an MLP that is computed again keeps it."""

    @property
    def all(self) -> float:
        return self.residual + self.norm + self.attn_proj + self.attention + self.mlp + self.experts + self.router

    def kept(self, ac: ActivationCheckpointSection | None, place: int | None) -> float:
        """Numbers per token after the forward pass of a block.

        place: in its group of blocks that are computed again; None: it is in none.
        """
        if ac is None or place is None:
            return self.all
        if ac.mode == "full":
            return self.width if place == 0 else 0.0
        parts = {"attn_proj": self.attn_proj, "mlp": self.mlp, "routed_experts": self.experts}
        gathered = self.gathered * len({"attn_proj", "mlp"} & set(ac.targets))
        return self.all + gathered - sum(parts.get(target, 0.0) for target in ac.targets)


def block_activations(
    cfg: ModelConfig, layer: int, *, tp: int = 1, splits_tokens: bool = False, is_cpu: bool, is_half: bool
) -> BlockActivations:
    """The activations of a block on one rank, in numbers per token of all ranks of tp.

    splits_tokens: ranks of tp split the tokens outside the layers that they cut. is_half: 16-bit numbers; on a CPU
    these are computed without kernels in C.
    """
    width = float(cfg.hidden_size)
    own = 1 / tp if splits_tokens else 1.0  # share of the tokens
    has_kernels = is_cpu and not is_half
    kind = cfg.mixer_of(layer).name
    has_mlp = layer not in cfg.layers_without_mlp
    mixed, attention, projected = _mixer(cfg, layer, kind, tp, is_cpu=is_cpu, has_kernels=has_kernels)
    halves = (kind != "none") + has_mlp
    mlp, experts, router = 0.0, 0.0, 0.0
    forward, moments = 2 * width, [Moment(width + attention, 0.0, 0.0)]
    if has_mlp and cfg.is_sparse(layer):
        moe = cfg.moe
        assert moe is not None
        size = moe.latent_size or width
        inner = moe.top_k * moe.intermediate_size
        # Products of gate and up, silu of one half, their product: grouped products have no kernel in C.
        experts = own * inner * (2.0 if moe.is_plain else 4.0)
        router = own * (moe.top_k * 2 * size + moe.num_experts + 6.0 * moe.top_k)
        if moe.shared_size is not None:
            mlp = _mlp(moe.shared_size / tp, is_plain=moe.is_plain, has_kernels=has_kernels)
        forward += own * moe.top_k * size
        moments = _mixture_moments(own * width, own * moe.top_k * size, own * inner, 0.5 if moe.is_plain else 1 / 3)
    elif has_mlp:
        dense = cfg.intermediate_size / tp
        mlp = _mlp(dense, is_plain=cfg.has_plain_mlp, has_kernels=has_kernels)
        share = 0.5 if cfg.has_plain_mlp else 1 / 3
        moments = [Moment(width + 2 * dense, share, share)]
    if has_mlp:  # all of the MLP is done when attention's turn comes
        moments.append(Moment(width + attention - mlp - experts - router, 1.0, 0.0))
    # A norm in 16 bits keeps its input in 32 bits, and its result before the weight is applied.
    norm = width * halves * (1.0 if not is_half else 4.0 if is_cpu else 1.0)
    latent = cfg.shape_of("latent")
    indexer = None if latent is None else latent.indexer
    chooses = indexer is not None and indexer.sources[layer] == layer
    return BlockActivations(
        residual=own * (width * halves + 2.0 * halves),
        norm=own * norm,
        attn_proj=projected,
        attention=mixed,
        mlp=mlp,
        experts=experts,
        router=router,
        choice_bytes=INDEX_BYTES * indexer.top_k if chooses and indexer is not None else 0.0,
        forward=forward,
        backward=tuple(moments),
        width=own * width,
        gathered=(1 - own) * width,
    )


def _mixture_moments(width: float, copies: float, inner: float, down: float) -> list[Moment]:
    """The sum over a token's experts; the down products; the gates; the products with gate and up.

    copies: numbers per token in the rows of all its experts. down: share of the weights in the down products.
    """
    return [
        Moment(width + 2 * copies, 0.0, 0.0),
        Moment(width + inner, down, down),
        Moment(width - copies + 2 * inner, down, 0.0),
        Moment(width - 2 * inner, 1.0, 1 - down),
    ]


def _mlp(inner: float, *, is_plain: bool, has_kernels: bool) -> float:
    """relu(up) and its square; or gate, up and their product, and silu(gate) without the kernel."""
    return inner * (2.0 if is_plain else 3.0 if has_kernels else 4.0)


def _mixer(
    cfg: ModelConfig, layer: int, kind: str, tp: int, *, is_cpu: bool, has_kernels: bool
) -> tuple[float, float, float]:
    """What attention keeps, the gradients at its widest place, and what its projections keep before it."""
    if kind == "none":
        return 0.0, 0.0, 0.0
    if kind == "gated_delta":
        delta = cfg.mixer_of(layer).shape
        keys, values = delta.num_key_heads * delta.key_head_dim, delta.num_value_heads * delta.value_head_dim
        channels = 2 * keys + values
        return 3.0 * channels + 4.0 * values, 2.0 * channels, 0.0
    if kind == "mamba":
        mamba = cfg.mixer_of(layer).shape
        size, state = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        return 6.0 * size + 6.0 * state, 3.0 * size, 0.0
    if kind == "latent":
        return _latent(cfg, layer)
    heads = cfg.attention(layer).num_heads / tp
    q, kv = heads * cfg.head_dim, cfg.num_kv_heads / tp * cfg.head_dim
    projected = q + kv + heads + cfg.num_kv_heads / tp if cfg.has_qk_norm else 0.0
    if not has_kernels:
        projected *= 3.0 if is_cpu else 1.0
    # Queries, keys, values, results, the norm of every softmax; GPUs repeat keys and values for their heads.
    seen = 2 * kv if has_kernels else 2 * q
    mixed = 2 * q + seen + heads + (0.0 if has_kernels else q * is_cpu)
    if cfg.attention_gate is not None or kind == "paired":
        mixed += 3 * q
    return mixed, 2 * (q + kv), projected


def _latent(cfg: ModelConfig, layer: int) -> tuple[float, float, float]:
    latent, heads = cfg.mixer_of(layer).shape, cfg.num_heads
    key = latent.plain_dim + latent.rotated_dim
    rank = latent.query_rank or 0
    small = 2.0 * rank + 2.0 * (latent.rank + latent.rotated_dim)
    if latent.indexer is None:
        expanded = heads * (latent.plain_dim + latent.value_dim)
        return heads * key * 4.0 + heads * latent.value_dim, 3.0 * heads * key, small + heads * key + expanded
    wide = heads * (latent.rank + latent.rotated_dim)
    index = latent.indexer.num_heads * latent.indexer.head_dim
    mixed = wide + heads * latent.rank + heads * latent.value_dim
    return mixed, wide + heads * latent.rank, small + heads * key + wide + index
