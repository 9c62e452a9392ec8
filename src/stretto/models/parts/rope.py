"""Rotary position embeddings: frequencies, tables by position, and the rotation.

A family may rotate only the first dims of each head (`Rope.fraction`), or neighbouring pairs (x[2i], x[2i + 1]) instead
of halves (x[i], x[i + dim/2]). Neighbouring pairs are put into the layout of halves as they are rotated: queries and
keys alike, so their products are unchanged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.families.shape import Rope
from stretto.models.device.kernels import find_row_kernels

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Angles(NamedTuple):
    """cos and sin of tokens, [tokens, 1, rotated dims]; the first half of sin is negated."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False

    def select(self, positions: Int[Tensor, "*axes tokens"], sections: tuple[int, ...] = ()) -> Angles:
        """The angles of these positions, from a table by position.

        positions: [3, tokens] for rows with images: by time, height and width, each for its `Rope.sections` pairs.
        """
        if positions.dim() == 1:
            cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
            return Angles(cos, sin, self.is_interleaved)
        index = positions.index_select(0, _axis_by_dim(sections, self.cos.shape[-1], positions.device)).T
        cos, sin = (table.squeeze(1).gather(0, index).unsqueeze(1) for table in (self.cos, self.sin))
        return Angles(cos, sin, self.is_interleaved)


def _axis_by_dim(sections: tuple[int, ...], num_dims: int, device: torch.device) -> Int[Tensor, " dims"]:
    """0, 1 or 2 for each rotated dim if its pair is rotated by time, height or width."""
    axes = torch.zeros(num_dims // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return torch.cat((axes, axes)).to(device)


def rotate(x: Float[Tensor, "tokens heads dim"], angles: Angles) -> Float[Tensor, "tokens heads dim"]:
    """Rotate each pair (x[i], x[i + dim/2]) of the rotated dims by its position's angle.

    Source: RoPE, arXiv:2104.09864, in the half-split layout of Hugging Face checkpoints.
    """
    rotated = angles.cos.shape[-1]
    if rotated != x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], angles), x[..., rotated:]), dim=-1)
    if angles.is_interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        return _Rotation.apply(x, angles.cos, angles.sin)
    return _rotate_pairs(x, angles.cos, angles.sin)


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
    kernels = find_row_kernels(x, cos, sin)
    if kernels is not None and cos.shape == sin.shape == (len(x), 1, x.shape[-1]) and x.dim() == 3:
        return kernels.rotate(x, cos, sin, sign)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=sign)


def angle_table(rope: Rope, head_dim: int, max_positions: int, device: torch.device, dtype: torch.dtype) -> Angles:
    """cos and sin by position, [positions, 1, rotated dims]."""
    freqs, scale = inverse_frequencies(rope, head_dim, max_positions)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(freqs, dtype=torch.float32))
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return Angles(cos.unsqueeze(1).to(device, dtype), sin.unsqueeze(1).to(device, dtype), rope.is_interleaved)


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    """The angular frequency of each rotated pair of dims, and the factor on cos and sin.

    Source: RoPE, arXiv:2104.09864; linear: position interpolation, arXiv:2306.15595; YaRN, arXiv:2309.00071,
    section 3.2 (the ramp between dims) and 3.4 (the factor); llama3: the Llama 3.1 models' config.json.
    """
    dims = int(head_dim * rope.fraction + 1e-6)
    plain = [rope.theta ** (-dim / dims) for dim in range(0, dims, 2)]
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return [freq / rope.factor for freq in plain], 1.0
    trained = rope.original_max_positions or max_positions
    if rope.kind == "llama3":
        return [_llama3_frequency(freq, rope, trained) for freq in plain], 1.0

    def dim_of(num_rotations: float) -> float:
        return dims * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = [min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0) for i in range(len(plain))]
    mixed = [freq * (1 - r) + freq / rope.factor * r for freq, r in zip(plain, ramp)]
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return mixed, scale


def _llama3_frequency(freq: float, rope: Rope, trained: int) -> float:
    """Low frequencies are divided by the factor, high ones unchanged, others mixed."""
    turns = trained * freq / (2 * math.pi)  # rotations over the original context length
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = min(max((turns - rope.low_freq_factor) / span, 0.0), 1.0)
    return freq * keep + freq / rope.factor * (1 - keep)
