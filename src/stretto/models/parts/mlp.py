"""The gated MLP of a dense block, and of the expert that every token of a mixture uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.models.device.kernels import RowKernels, find_row_kernels

if TYPE_CHECKING:
    from jaxtyping import Float


def gate_product(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """silu(gate) * up."""
    kernels = find_row_kernels(gate, up)
    if kernels is None or gate.shape != up.shape:
        return F.silu(gate) * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GateProduct.apply(gate, up, kernels)
    return kernels.gate_product(gate, up)


class _GateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.gate_product_backward(*ctx.saved_tensors, grad), None


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
