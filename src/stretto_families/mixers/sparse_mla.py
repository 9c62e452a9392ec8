"""Multi-head latent attention to keys that an indexer chooses (DeepSeek Sparse Attention).

Queries are multiplied by the matrix that would expand the keys, so that all heads attend to the same small vector per
token: each query's keys are gathered, and expanded ones would be too large. The attended vectors are expanded to values
afterwards. The choice of keys, and the attention to them, is in key_choice.py.

Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1; choices shared by layers: arXiv:2603.12201. Differs: the index is
computed in float32, not in rotated 8-bit floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.parts.attend import Attend, Limits
from stretto.models.parts.rope import Angles, rotate
from stretto_families.mixers.key_choice import IndexVectors, KeyChoice
from stretto_families.mixers.mla import LatentAttention

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.families.shape import ModelConfig
    from stretto.models.fused import RowMatrices
    from stretto.models.parts.router import Routing
    from stretto_families.shapes import IndexerShape

_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Scores of earlier tokens, from small queries and one key per token.

    Its weights are frozen until a trainer unfreezes them: a choice has no gradient, so the model's loss never reaches
    them. A loss of the index itself is in key_choice.py.
    """

    def __init__(self, shape: IndexerShape, hidden_size: int, query_rank: int) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = nn.Linear(query_rank, shape.num_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, shape.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(shape.head_dim, eps=_NORM_EPS)
        self.weights_proj = nn.Linear(hidden_size, shape.num_heads, bias=False)
        self.requires_grad_(False)

    def forward(
        self, x: Float[Tensor, "tokens dim"], small_q: Float[Tensor, "tokens rank"], angles: Angles
    ) -> IndexVectors:
        """The vectors of these tokens; the model behind x and small_q gets no gradient from them."""
        x, small_q, shape = x.detach(), small_q.detach(), self.shape
        angles = angles._replace(is_interleaved=shape.is_interleaved)
        queries = rotate(self.wq_b(small_q).unflatten(-1, (shape.num_heads, shape.head_dim)), angles)
        keys = rotate(self.k_norm(self.wk(x)).unsqueeze(1), angles).squeeze(1)
        weights = F.linear(x.float(), self.weights_proj.weight.float())
        return IndexVectors(queries, weights * (shape.num_heads * shape.head_dim) ** -0.5, keys)


class SparseLatentAttention(LatentAttention):
    """Latent attention to chosen keys; a layer without an indexer uses an earlier choice."""

    matrix = "kv_b_proj"
    addends: RowMatrices | None = None
    """In an engine, whose rows have different adapters: those of this layer, which is not applied to the rows."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        indexer = self.shape.indexer
        assert indexer is not None and self.shape.query_rank is not None
        self.source, self.top_k = indexer.sources[layer], indexer.top_k
        if self.source == layer:
            self.indexer = Indexer(indexer, cfg.hidden_size, self.shape.query_rank)

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "tokens dim"],
        angles: Angles,
        layer: int,
        attend: Attend,
        rows: Int[Tensor, " rows"] | None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "rows dim"]:
        assert routing is not None, "a pass keeps its choices there"
        q, small, from_small, vectors = self.project(x, angles)
        choice = KeyChoice(
            self.source, self.top_k, self.key_dim**-0.5, routing.key_choices, vectors,
            routing.index_loss_scale, routing.index_losses,
        )  # fmt: skip
        keys = small.unsqueeze(1)
        attended = attend(layer, q, keys, keys[..., : self.shape.rank], Limits(None, None, choice))
        if rows is not None:
            attended = attended.index_select(0, rows)
        mixed = torch.einsum("thr,rhv->thv", attended, from_small)
        for at, count, matrix in self._addends():
            self._add(mixed, "thr,rhv->thv", attended, at, count, matrix[..., self.shape.plain_dim :])
        return self.o_proj(mixed.flatten(1))

    def _addends(self) -> list[tuple[Tensor | None, int, Tensor]]:
        """`addends` by head: [rank, heads, plain_dim + value_dim]."""
        if self.addends is None:
            return []
        by_head = (-1, self.shape.plain_dim + self.shape.value_dim)
        return [(at, count, matrix.unflatten(-1, by_head)) for at, count, matrix in self.addends()]

    @staticmethod
    def _add(out: Tensor, formula: str, x: Tensor, at: Tensor | None, count: int, matrix: Tensor) -> None:
        if at is None:
            out += torch.einsum(formula, x, matrix)
        else:
            out.index_add_(0, at[:count], torch.einsum(formula, x.index_select(0, at), matrix)[:count])

    def project(  # type: ignore[override]
        self, x: Float[Tensor, "tokens dim"], angles: Angles
    ) -> tuple[
        Float[Tensor, "tokens heads small_dim"],
        Float[Tensor, "tokens small_dim"],
        Float[Tensor, "rank heads value_dim"],
        IndexVectors | None,
    ]:
        """Queries and keys of rank + rotated_dim, the matrix that expands values, the index."""
        shape = self.shape
        small_q = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(small_q).unflatten(-1, (-1, self.key_dim))
        q_plain, q_rotated = q.split((shape.plain_dim, shape.rotated_dim), -1)
        small, shared = self.kv_a_proj_with_mqa(x).split((shape.rank, shape.rotated_dim), -1)
        small = torch.cat((self.kv_a_layernorm(small), rotate(shared.unsqueeze(1), angles).squeeze(1)), -1)
        # Applied to the identity, the layer returns its whole matrix, with its adapter if it has one.
        identity = torch.eye(shape.rank, dtype=x.dtype, device=x.device)
        expand = self.kv_b_proj(identity).unflatten(-1, (-1, shape.plain_dim + shape.value_dim))
        to_small, from_small = expand.split((shape.plain_dim, shape.value_dim), -1)
        q_small = torch.einsum("thp,rhp->thr", q_plain, to_small)
        for at, count, matrix in self._addends():
            self._add(q_small, "thp,rhp->thr", q_plain, at, count, matrix[..., : shape.plain_dim])
        q = torch.cat((q_small, rotate(q_rotated, angles)), -1)
        if shape.query_factor != 1.0:
            q = q * shape.query_factor
        has_indexer = hasattr(self, "indexer")
        return q, small, from_small, self.indexer(x, small_q, angles) if has_indexer else None
