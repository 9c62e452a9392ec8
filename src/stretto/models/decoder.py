"""A decoder over a flat row of tokens: the forward pass of trainer and engine.

Attention is an argument (`Attend`): the trainer's is over packed documents (attention.py), the engine's over its paged
KV cache. So are the options of the routers (`Routing`, moe.py). Parameter names are those of Hugging Face checkpoints,
except for the rules of a family (tensor_map.py). The engine runs the same pass without modules (fused.py).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.models.attention import Attend, PackedLayout
from stretto.models.config import inverse_frequencies
from stretto.models.families import FAMILIES
from stretto.models.moe import MoE, Routing
from stretto.models.norm import rms_norm
from stretto.models.shape import ModelConfig
from stretto.models.tensor_map import TensorMap

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CosSin = tuple[Tensor, Tensor]
"""cos and sin of every token, [tokens, 1, head_dim]; the first half of sin is negated for `rotate`."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        if x.dtype is torch.float32:
            return rms_norm(x, self.weight, self.eps)
        return self.weight * rms_norm(x.float(), None, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, with normalised queries and keys if the family has them."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        q_size, kv_size = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.head_dim = cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, q_size, bias=cfg.qkv_bias)
        self.k_proj = nn.Linear(cfg.hidden_size, kv_size, bias=cfg.qkv_bias)
        self.v_proj = nn.Linear(cfg.hidden_size, kv_size, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(q_size, cfg.hidden_size, bias=cfg.out_bias)
        self.has_qk_norm = cfg.has_qk_norm
        if cfg.has_qk_norm:
            self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
            self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        angles: CosSin,
        layer: int,
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
    ) -> Float[Tensor, "rows dim"]:
        attended = attend(layer, *self.project(x, angles)).flatten(1)
        return self.o_proj(_select_rows(attended, rows))

    def project(
        self, x: Float[Tensor, "tokens dim"], angles: CosSin
    ) -> tuple[
        Float[Tensor, "tokens heads head_dim"],
        Float[Tensor, "tokens kv_heads head_dim"],
        Float[Tensor, "tokens kv_heads head_dim"],
    ]:
        """Queries, keys and values, [tokens, heads, head_dim], rotated by position."""
        by_head = (-1, self.head_dim)  # unflatten, because view fails with 0 tokens
        q = self.q_proj(x).unflatten(-1, by_head)
        k = self.k_proj(x).unflatten(-1, by_head)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.v_proj(x).unflatten(-1, by_head)
        return rotate(q, angles), rotate(k, angles), v


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=cfg.mlp_bias)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=cfg.mlp_bias)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.mlp_bias)

    def forward(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then an MLP or a mixture of experts, each on the normalised residual stream."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn = Attention(cfg)
        self.mlp = MoE(cfg) if cfg.is_sparse(layer) else MLP(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        angles: CosSin,
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
        routing: Routing,
    ) -> Float[Tensor, "rows dim"]:
        x = _select_rows(x, rows) + self.self_attn(self.input_layernorm(x), angles, self.layer, attend, rows)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            return x + self.mlp(normed, self.layer, routing, rows)
        return x + self.mlp(normed)


class Stack(nn.Module):
    """Embedding, blocks and final norm; `model` in a checkpoint."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class Decoder(nn.Module):
    """token ids -> hidden states; logits are hidden @ output_weight.T (lm_head.py)."""

    shares_prefixes = True
    """True: `hidden` supports layouts whose segments continue others, and takes a `routing`."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.config = cfg
        self.model = Stack(cfg)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self._angle_table: CosSin | None = None

    @property
    def output_weight(self) -> Float[Tensor, "vocab dim"]:
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @cached_property
    def tensor_map(self) -> TensorMap:
        """Where every weight is in a checkpoint of this family."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        return TensorMap(shapes, FAMILIES[self.config.family].weights)

    @cached_property
    def unsharded_names(self) -> frozenset[str]:
        """Parameters that every rank has whole: expert biases, float32, without gradients."""
        return frozenset(name for name, _ in self.named_parameters() if name.endswith("expert_bias"))

    def forward(
        self,
        token_ids: Int[Tensor, " tokens"],
        position_ids: Int[Tensor, " tokens"],
        attend: Attend,
        rows: Int[Tensor, " rows"] | None = None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of all tokens, or only of `rows`: the last block then computes no others."""
        x = self.model.embed_tokens(token_ids)
        angles = self.angles(position_ids, x.dtype)
        routing = routing or Routing()
        last = len(self.model.layers) - 1
        for layer, block in enumerate(self.model.layers):
            x = block(x, angles, attend, rows if layer == last else None, routing)
        return self.model.norm(x)

    def hidden(
        self,
        token_ids: Int[Tensor, " tokens"],
        layout: PackedLayout,
        rows: Int[Tensor, " rows"] | None = None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of packed documents, each as if it were alone in the row."""
        return self(token_ids, layout.position_ids, layout.attend, rows, routing)

    def angles(self, position_ids: Int[Tensor, " tokens"], dtype: torch.dtype) -> CosSin:
        """cos and sin of these positions, [tokens, 1, head_dim]; computed once for all layers."""
        table = self._angle_table
        if table is None or table[0].device != position_ids.device or table[0].dtype != dtype:
            table = self._angle_table = angle_table(self.config, position_ids.device, dtype)
        return table[0].index_select(0, position_ids), table[1].index_select(0, position_ids)


def angle_table(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> CosSin:
    """cos and sin by position, [positions, 1, head_dim]."""
    freqs, scale = inverse_frequencies(cfg.rope, cfg.head_dim, cfg.max_position_embeddings)
    positions = torch.arange(cfg.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(freqs, dtype=torch.float32))
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.unsqueeze(1).to(device, dtype), sin.unsqueeze(1).to(device, dtype)


def rotate(x: Float[Tensor, "tokens heads dim"], angles: CosSin) -> Float[Tensor, "tokens heads dim"]:
    """Rotate each pair (x[i], x[i + dim/2]) by its position's angle.

    Source: RoPE, arXiv:2104.09864, in the half-split layout of Hugging Face checkpoints.
    """
    if torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        return _Rotation.apply(x, *angles)
    return _rotate_pairs(x, *angles)


class _Rotation(torch.autograd.Function):
    """RoPE with a backward pass of the same operations: the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, sin, sign=-1), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=sign)


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
