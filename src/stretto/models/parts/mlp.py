"""The gated MLP of a dense block, and of the expert that every token of a mixture uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.native.training import gate_product

if TYPE_CHECKING:
    from jaxtyping import Float


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=has_bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=has_bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=has_bias)

    def forward(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        return self.down_proj(gate_product(self.gate_proj(x), self.up_proj(x)))


class PlainMLP(nn.Module):
    """MLP without a gate: down(relu(up(x)) ** 2)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=has_bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=has_bias)

    def forward(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        return self.down_proj(F.relu(self.up_proj(x)).square())
