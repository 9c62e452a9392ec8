"""A decoder over a flat row of tokens: the forward pass of trainer and engine.

Attention is an argument (`Attend`): the trainer's is over packed documents (attention.py), the engine's over its paged
KV cache. So are the options of the routers (`Routing`, moe.py). Parameter names are those of Hugging Face checkpoints,
except for the rules of a family (tensor_map.py). The engine runs the same pass without modules (fused.py).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.addons import object_at
from stretto.families.shape import ATTENTION, NO_MIXER, ModelConfig, Rope
from stretto.families.table import FAMILIES
from stretto.models.attention import PackedLayout
from stretto.models.moe import MoE
from stretto.models.parts.attend import Attend, Heads, Limits
from stretto.models.parts.initial import build_embedding
from stretto.models.parts.mlp import MLP, PlainMLP
from stretto.models.parts.norm import CentredRMSNorm, RMSNorm
from stretto.models.parts.rope import Angles, angle_table, rotate
from stretto.models.parts.router import Routing
from stretto.models.parts.vision import ImageBatch, ImageVectors, VisionTower
from stretto.models.tensor_map import CheckpointReader, TensorMap

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.models.fp8.checkpoint import BlockLayout


def build_norm(cfg: ModelConfig, dim: int) -> RMSNorm:
    """A norm over `dim` values of this model's kind."""
    return (CentredRMSNorm if cfg.has_centred_norms else RMSNorm)(dim, cfg.rms_norm_eps)


def build_mlp(cfg: ModelConfig) -> MLP | PlainMLP:
    """The MLP of a dense block."""
    kind = PlainMLP if cfg.has_plain_mlp else MLP
    return kind(cfg.hidden_size, cfg.intermediate_size, has_bias=cfg.mlp_bias)


class Attention(nn.Module):
    """Grouped-query attention; some families have normed queries and keys, sinks or a gate."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        shape, self.gate = cfg.attention(layer), cfg.attention_gate
        q_size, kv_size = shape.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.head_dim, self.window = cfg.head_dim, shape.window
        self.q_proj = nn.Linear(cfg.hidden_size, q_size, bias=cfg.qkv_bias)
        self.k_proj = nn.Linear(cfg.hidden_size, kv_size, bias=cfg.qkv_bias)
        self.v_proj = nn.Linear(cfg.hidden_size, kv_size, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(q_size, cfg.hidden_size, bias=cfg.out_bias)
        self.has_qk_norm, self.is_norm_joint = cfg.has_qk_norm, cfg.is_qk_norm_joint
        if cfg.has_qk_norm:
            self.q_norm = build_norm(cfg, q_size if self.is_norm_joint else cfg.head_dim)
            self.k_norm = build_norm(cfg, kv_size if self.is_norm_joint else cfg.head_dim)
        self.sinks = nn.Parameter(torch.empty(shape.num_heads)) if cfg.has_sinks else None
        if self.gate is not None:
            size = shape.num_heads if self.gate.is_per_head else q_size
            self.add_module(self.gate.name, nn.Linear(cfg.hidden_size, size, bias=False))

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        angles: Angles | None,
        layer: int,
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """The attended values of all tokens or `rows`; routing: for mixers that choose what they read."""
        q, k, v, gate = self.project(x, angles)
        attended = _select_rows(self.mix(layer, q, k, v, attend), rows)
        if self.gate is not None:
            if gate is None:
                gate = self.get_submodule(self.gate.name)(_select_rows(x, rows))
            else:
                gate = _select_rows(gate, rows)
            attended = self.gated(attended, gate)
        return self.o_proj(attended)

    def project(
        self, x: Float[Tensor, "tokens dim"], angles: Angles | None
    ) -> tuple[
        Float[Tensor, "tokens heads head_dim"],
        Float[Tensor, "tokens kv_heads head_dim"],
        Float[Tensor, "tokens kv_heads head_dim"],
        Float[Tensor, "tokens q_size"] | None,
    ]:
        """Queries, keys and values, normalised and rotated; and the gates that `queries` computes."""
        q, gate = self.queries(x)
        return *self.turn(q, self.k_proj(x), self.v_proj(x), angles), gate

    def queries(
        self, x: Float[Tensor, "tokens dim"]
    ) -> tuple[Float[Tensor, "tokens q_size"], Float[Tensor, "tokens q_size"] | None]:
        """Queries, not yet rotated; and gates if one product computes both, else None."""
        return self.q_proj(x), None

    def turn(
        self,
        q: Float[Tensor, "tokens q_size"],
        k: Float[Tensor, "tokens kv_size"],
        v: Float[Tensor, "tokens kv_size"],
        angles: Angles | None,
    ) -> tuple[
        Float[Tensor, "tokens heads head_dim"],
        Float[Tensor, "tokens kv_heads head_dim"],
        Float[Tensor, "tokens kv_heads head_dim"],
    ]:
        """Queries, keys and values by head from the results of the products, normalised and rotated."""
        if self.is_norm_joint:
            q, k = self.q_norm(q), self.k_norm(k)
        by_head = (-1, self.head_dim)  # unflatten, because view fails with 0 tokens
        q, k, v = q.unflatten(-1, by_head), k.unflatten(-1, by_head), v.unflatten(-1, by_head)
        if self.has_qk_norm and not self.is_norm_joint:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if angles is None else (rotate(q, angles), rotate(k, angles), v)

    def mix(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads value_dim"],
        attend: Attend,
    ) -> Float[Tensor, "tokens mixed"]:
        """The attended values of all heads, within the limits of this layer."""
        if self.window is None and self.sinks is None:
            return attend(layer, q, k, v).flatten(1)
        return attend(layer, q, k, v, Limits(self.window, self.sinks)).flatten(1)

    def gated(
        self, attended: Float[Tensor, "rows q_size"], gate: Float[Tensor, "rows gates"]
    ) -> Float[Tensor, "rows q_size"]:
        """Attended values times the activation of the gate's product."""
        assert self.gate is not None
        is_sigmoid = self.gate.activation == "sigmoid"
        gate = gate.sigmoid() if is_sigmoid else F.softplus(gate.float()).to(gate.dtype)
        if not self.gate.is_per_head:
            return attended * gate
        return (attended.unflatten(-1, (-1, self.head_dim)) * gate.unsqueeze(-1)).flatten(1)


class Block(nn.Module):
    """A mixer of tokens, then an MLP or experts, each on the normalised residual stream.

    The mixer is attention, or what the family brings (`Mixer`); one that is recurrent is `linear_attn`, all others are
    `self_attn`. A family may have blocks with only one of the two halves. If the family has post norms, the results of
    both are normalised as well.
    """

    mlp: MLP | PlainMLP | MoE | None

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        kind = cfg.mixer_of(layer)
        self.is_recurrent = kind.states is not None
        if kind != NO_MIXER:
            build = Attention if kind == ATTENTION else object_at(kind.module)
            self.add_module("linear_attn" if self.is_recurrent else "self_attn", build(cfg, layer))
            self.input_layernorm = build_norm(cfg, cfg.hidden_size)
        self.mlp = None
        if layer not in cfg.layers_without_mlp:
            self.mlp = MoE(cfg) if cfg.is_sparse(layer) else build_mlp(cfg)
            self.post_attention_layernorm = build_norm(cfg, cfg.hidden_size)
        self.has_post_norms = cfg.has_post_norms
        if cfg.has_post_norms:
            self.post_self_attn_layernorm = build_norm(cfg, cfg.hidden_size)
            self.post_mlp_layernorm = build_norm(cfg, cfg.hidden_size)

    @property
    def mixer(self) -> Any:
        """The module that lets a token see earlier ones; None for a block with an MLP only."""
        return getattr(self, "linear_attn" if self.is_recurrent else "self_attn", None)

    @property
    def norms(self) -> list[RMSNorm]:
        """The norms of the residual stream."""
        return [module for module in self.children() if isinstance(module, RMSNorm)]

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        angles: Angles | None,
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
        routing: Routing,
        documents: Any = None,
    ) -> Float[Tensor, "rows dim"]:
        mixer, mixed = self.mixer, None
        if self.is_recurrent:
            assert documents is not None, "recurrent mixers need documents"
            mixed = mixer(self.input_layernorm(x), documents.at(self.layer), rows)
        elif mixer is not None:
            mixed = mixer(self.input_layernorm(x), angles, self.layer, attend, rows, routing)
        x = _select_rows(x, rows)
        if mixed is not None:
            x = x + (self.post_self_attn_layernorm(mixed) if self.has_post_norms else mixed)
        if self.mlp is None:
            return x
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            out = self.mlp(normed, self.layer, routing, rows)
        else:
            out = self.mlp(normed)
        return x + (self.post_mlp_layernorm(out) if self.has_post_norms else out)


class Stack(nn.Module):
    """Embedding, blocks, final norm and perhaps a vision tower; `model` in a checkpoint."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = build_embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_layers))
        self.norm = build_norm(cfg, cfg.hidden_size)
        if cfg.vision is not None:
            self.visual = VisionTower(cfg.vision)

    @property
    def blocks(self) -> list[Block]:
        """`layers` as what they are; a ModuleList has modules of any kind."""
        return cast("list[Block]", list(self.layers))


class Decoder(nn.Module):
    """token ids -> hidden states; logits are hidden @ output_weight.T (lm_head.py)."""

    layout: BlockLayout | None = None
    """In an engine: which weights the checkpoint has in 8 bits; None: none of them."""
    logit_cap: float | None = None
    """The soft cap of `head_logits`; none of our families has one."""
    checkpoint_reader: CheckpointReader
    """Reads the weights of a model on the meta device; set by hub.build_meta_model."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.config = cfg
        self.shares_prefixes = not cfg.has_recurrence
        """True if `hidden` supports layouts whose segments continue others."""
        self.model = Stack(cfg)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.groups = [range(cfg.num_layers)]
        """Blocks that `run` computes in one call: a trainer computes a group again as a whole."""
        self._angle_tables: dict[Rope, Angles] = {}
        self._build_documents = next((block.mixer.documents for block in self.model.blocks if block.is_recurrent), None)
        self._rope_by_layer = [cfg.attention(layer).rope for layer in range(cfg.num_layers)]

    @property
    def output_weight(self) -> Float[Tensor, "vocab dim"]:
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @cached_property
    def tensor_map(self) -> TensorMap:
        """Where every weight is in a checkpoint of this family."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        family = FAMILIES[self.config.family]
        return TensorMap(shapes, family.weights, family.text_prefix)

    @cached_property
    def unsharded_names(self) -> frozenset[str]:
        """Names of parameters that every rank has whole: expert biases, without gradients."""
        return frozenset(name for name, _ in self.named_parameters() if name.endswith("expert_bias"))

    def forward(
        self,
        token_ids: Int[Tensor, " tokens"],
        position_ids: Int[Tensor, "*axes tokens"],
        attend: Attend,
        rows: Int[Tensor, " rows"] | None = None,
        routing: Routing | None = None,
        documents: Any = None,
        images: ImageBatch | ImageVectors | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of all tokens, or only of `rows`: the last block then computes no others.

        position_ids: [3, tokens] in a row with images (parts/image_positions.py).
        documents: where recurrent mixers start anew (`documents`), or the states that they continue; a model with such
        mixers needs it. images: those that the tower encodes in this pass, or their vectors from an earlier one.
        """
        x = self.embed(token_ids)
        vectors = self.model.visual(images) if isinstance(images, ImageBatch) else images
        if vectors is not None:
            x = vectors.place(x)
        angles = self.angles(position_ids, x.dtype)
        routing = routing or Routing()
        for layers in self.groups:
            x = self.run(x, layers, angles, attend, rows, routing, documents, vectors)
        return self.model.norm(x)

    def run(
        self,
        x: Float[Tensor, "tokens dim"],
        layers: range,
        angles: list[Angles | None],
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
        routing: Routing,
        documents: Any,
        vectors: ImageVectors | None,
    ) -> Float[Tensor, "rows dim"]:
        """The residual stream after some blocks; after the last one, only of `rows`."""
        last = len(self.model.layers) - 1
        for layer in layers:
            is_cut = layer == last and (vectors is None or layer >= len(vectors.deepstack))
            x = self.model.layers[layer](x, angles[layer], attend, rows if is_cut else None, routing, documents)
            if vectors is not None and not is_cut:
                x = vectors.add(layer, x)
        return x if last not in layers or is_cut else _select_rows(x, rows)

    def hidden(
        self,
        token_ids: Int[Tensor, " tokens"],
        layout: PackedLayout,
        rows: Int[Tensor, " rows"] | None = None,
        routing: Routing | None = None,
        images: ImageBatch | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of packed documents, each as if it were alone in the row.

        With images, the layout has the positions of their tokens.
        """
        documents = self.documents(layout)
        return self(token_ids, layout.rotations, layout.attend, rows, routing, documents, images)

    def documents(self, layout: PackedLayout, heads: Heads | None = None) -> Any:
        """What recurrent mixers need of a packed row, in which no segment may have a parent; None without such mixers.

        heads: how ranks that have some of the tokens each swap heads for tokens; None: all tokens are here.
        """
        if self._build_documents is None:
            return None
        assert not layout.has_parents, "a state cannot be shared"
        return self._build_documents(layout.tree, layout.device, heads)

    def embed(self, token_ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens dim"]:
        """The embeddings of tokens, times `embedding_scale`."""
        x, scale = self.model.embed_tokens(token_ids), self.config.embedding_scale
        return x if scale == 1.0 else x * scale

    def angles(self, position_ids: Int[Tensor, "*axes tokens"], dtype: torch.dtype) -> list[Angles | None]:
        """cos and sin of these positions by layer; None for a layer that does not rotate."""
        cfg = self.config
        by_rope: dict[Rope | None, Angles | None] = {None: None}
        for rope in cfg.ropes:
            table = self._angle_tables.get(rope)
            if table is None or table.cos.device != position_ids.device or table.cos.dtype != dtype:
                table = self._angle_tables[rope] = angle_table(
                    rope, cfg.head_dim, cfg.max_position_embeddings, position_ids.device, dtype
                )
            by_rope[rope] = table.select(position_ids, rope.sections)
        return [by_rope[rope] for rope in self._rope_by_layer]


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
