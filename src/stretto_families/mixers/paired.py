"""Attention whose q_proj computes a gate beside each query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from stretto.families.shape import AttentionGate, ModelConfig
from stretto.models.decoder import Attention

if TYPE_CHECKING:
    from jaxtyping import Float


class PairedAttention(Attention):
    """The gate is applied by its sigmoid."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.q_proj = nn.Linear(cfg.hidden_size, 2 * self.q_proj.out_features, bias=cfg.qkv_bias)
        self.gate = AttentionGate("q_proj", "sigmoid", is_per_head=False)

    def queries(
        self, x: Float[Tensor, "tokens dim"]
    ) -> tuple[Float[Tensor, "tokens q_size"], Float[Tensor, "tokens q_size"]]:
        """Queries, not yet rotated, and gates."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        return q.flatten(1), gate.flatten(1)
