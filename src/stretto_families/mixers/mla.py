"""Multi-head latent attention: keys and values are expanded from one small vector per token.

The last dims of each query are rotated by position, and so is one key that all heads share. Attention itself is that of
other families (`Attend`): keys and values are expanded first, and values are padded with zeros to the width of keys. So
documents, shared prompts, context parallelism and the engine's cache need no special code.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1. Differs: nothing is absorbed into the projections; the engine caches
expanded keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.parts.norm import RMSNorm
from stretto.models.parts.rope import Angles, rotate

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.families.shape import ModelConfig
    from stretto.models.parts.attend import Attend
    from stretto.models.parts.router import Routing
    from stretto_families.shapes import LatentShape

_NORM_EPS = 1e-6
"""Epsilon of the norms of the small vectors, whatever that of other norms is."""


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values come from small vectors."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        shape: LatentShape = cfg.mixer_of(layer).shape
        self.shape = shape
        self.key_dim = shape.plain_dim + shape.rotated_dim
        q_size, kv_size = cfg.num_heads * self.key_dim, cfg.num_heads * (shape.plain_dim + shape.value_dim)
        if shape.query_rank is None:
            self.q_proj = nn.Linear(cfg.hidden_size, q_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(cfg.hidden_size, shape.query_rank, bias=cfg.qkv_bias)
            self.q_a_layernorm = RMSNorm(shape.query_rank, _NORM_EPS)
            self.q_b_proj = nn.Linear(shape.query_rank, q_size, bias=False)
        small = shape.rank + shape.rotated_dim
        self.kv_a_proj_with_mqa = nn.Linear(cfg.hidden_size, small, bias=cfg.qkv_bias)
        self.kv_a_layernorm = RMSNorm(shape.rank, _NORM_EPS)
        self.kv_b_proj = nn.Linear(shape.rank, kv_size, bias=False)
        self.o_proj = nn.Linear(cfg.num_heads * shape.value_dim, cfg.hidden_size, bias=cfg.out_bias)

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        angles: Angles,
        layer: int,
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "rows dim"]:
        attended = attend(layer, *self.project(x, angles))[..., : self.shape.value_dim].flatten(1)
        return self.o_proj(attended if rows is None else attended.index_select(0, rows))

    def project(
        self, x: Float[Tensor, "tokens dim"], angles: Angles
    ) -> tuple[
        Float[Tensor, "tokens heads key_dim"],
        Float[Tensor, "tokens heads key_dim"],
        Float[Tensor, "tokens heads key_dim"],
    ]:
        """Queries (times `LatentShape.query_factor`), keys, and padded values."""
        shape = self.shape
        widths = (shape.plain_dim, shape.rotated_dim)
        q_plain, q_rotated = self.queries(x).unflatten(-1, (-1, self.key_dim)).split(widths, -1)
        q = torch.cat((q_plain, rotate(q_rotated, angles)), -1)
        if shape.query_factor != 1.0:
            q = q * shape.query_factor
        small, shared = self.kv_a_proj_with_mqa(x).split((shape.rank, shape.rotated_dim), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(small))
        expanded = expanded.unflatten(-1, (-1, shape.plain_dim + shape.value_dim))
        k, v = expanded.split((shape.plain_dim, shape.value_dim), -1)
        shared = rotate(shared.unsqueeze(1), angles).expand(-1, k.shape[1], -1)
        return q, torch.cat((k, shared), -1), F.pad(v, (0, self.key_dim - shape.value_dim))

    def queries(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens size"]:
        """Queries of all heads, not yet rotated."""
        if self.shape.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
