"""x / rms(x) * weight, with a backward pass of one kernel.

On CPUs torch computes its norm with six operations and differentiates each. Kernels of add-ons (device/kernels.py) do
both at once, on GPUs also in 16 bits. Where there are none, the gradient on a CPU comes from the kernel of torch's
layer norm, with mean 0 and with its term for the mean added back; on a GPU, and under torch.compile, torch's norm is
called. A pass without gradients has the same bits as one with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.models.device.kernels import RowKernels, find_row_kernels

if TYPE_CHECKING:
    from jaxtyping import Float


def rms_norm(
    x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"] | None, eps: float
) -> Float[Tensor, "*rows dim"]:
    """x / sqrt(mean(x ** 2) + eps) over the last dim, times weight if there is one.

    In 16 bits, which only kernels for GPUs compute, x / rms(x) is rounded before the weight multiplies it.
    Source: RMSNorm, arXiv:1910.07467. Differs: eps, as in Hugging Face models.
    """
    has_gradients = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    fits = weight is None or weight.shape == x.shape[-1:]
    kernels = find_row_kernels(x, weight) if fits else None
    if kernels is not None and not has_gradients:
        return kernels.rms_norm(x, weight, eps)[0]
    if (x.is_cuda and kernels is None) or not has_gradients or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, weight, eps, kernels)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, kernels: RowKernels | None) -> Tensor:
        ctx.kernels = kernels
        if kernels is not None:
            out, inverse = kernels.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, inverse)
            return out
        inverse = x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        out = x * inverse
        return out if weight is None else out.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        if ctx.kernels is not None:
            grads = ctx.kernels.rms_norm_backward(x, weight, inverse, grad, ctx.needs_input_grad[:2])
            return *grads, None, None
        needed = [*ctx.needs_input_grad[:2], False]
        dim = x.shape[-1]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [dim], torch.zeros_like(inverse), inverse, weight, None, needed
        )
        if needed[0]:
            # Layer norm subtracts the mean of grad * weight, which an RMS norm does not: add it back.
            means = grad.mean(-1, keepdim=True) if weight is None else (grad @ (weight / dim)).unsqueeze(-1)
            grad_x += means * inverse
        return grad_x if needed[0] else None, grad_weight if needed[1] else None, None, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        if x.dtype is torch.float32 or (x.is_cuda and find_row_kernels(x, self.weight) is not None):
            return rms_norm(x, self.weight, self.eps)
        return self.weight * rms_norm(x.float(), None, self.eps).to(x.dtype)


class CentredRMSNorm(RMSNorm):
    """RMSNorm whose weight is stored as its difference from 1."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)
