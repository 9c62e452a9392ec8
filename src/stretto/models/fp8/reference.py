"""Linear layers and experts that multiply in 8-bit floats, one scale per block of values.

Activations and gradients are quantized in tiles of 1 x 128 along the dim that a product sums over, weights in
blocks of 128 x 128; products are summed in float32. The weights themselves keep their dtype (optimizer, checkpoints and
exports do not see 8 bits): every pass quantizes them again. The error of a product is about 0.037 of its norm, and so
is that of both gradients.

`Kernels` computes the products in plain torch on any device; its subclasses for GPUs use triton and DeepGEMM
(an add-on has them). All products are grouped: rows are sorted by group, and `RowGroups` has the bounds; a linear layer
has one group.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3. Differs: every linear layer of a block and all experts run
in 8 bits in all three products; nothing is stored in 8 bits between passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.moe import Experts
from stretto.models.parts.router import Routing

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int, Int32

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of FP8; larger ones would round to NaN."""
SMALLEST_SCALE = 1e-12 / LARGEST


class Quantized(NamedTuple):
    """8-bit values, and the float32 scales to multiply them with."""

    values: Tensor
    scales: Tensor


@dataclass(frozen=True)
class RowGroups:
    """The bounds of groups of rows, and their division into tiles of at most 128 rows.

    bounds: int32 [groups + 1], from 0 to the number of rows. Tiles never cross groups. There are as many tiles as this
    number of rows and groups can need at most, so that nothing waits for the device; the last ones may be empty.
    """

    bounds: Int[Tensor, " groups_and_one"]
    num_rows: int

    @classmethod
    def one(cls, num_rows: int, device: torch.device) -> RowGroups:
        return cls(torch.tensor([0, num_rows], dtype=torch.int32, device=device), num_rows)

    @classmethod
    def of(cls, counts: Int[Tensor, " groups"], num_rows: int) -> RowGroups:
        return cls(F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), num_rows)

    @property
    def num_groups(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_tiles(self) -> int:
        if self.num_groups == 1:
            return -(-self.num_rows // BLOCK)
        return self.num_rows // BLOCK + self.num_groups

    @cached_property
    def first_tile(self) -> Int[Tensor, " groups_and_one"]:
        """Tile at which each group begins; the last entry is the number of tiles in use."""
        return F.pad((self.bounds.diff() + BLOCK - 1).div(BLOCK, rounding_mode="floor").cumsum(0), (1, 0))

    @cached_property
    def tiles(self) -> tuple[Int32[Tensor, " tiles"], Int32[Tensor, " tiles"], Int32[Tensor, " tiles"]]:
        """(group, first row, end of the group) of every tile, each int32 [tiles]."""
        numbers = torch.arange(self.num_tiles, device=self.bounds.device)
        group = torch.searchsorted(self.first_tile[1:].contiguous(), numbers, right=True)
        group = group.clamp(max=self.num_groups - 1)
        start = self.bounds[group] + (numbers - self.first_tile[group]) * BLOCK
        end = self.bounds[group + 1]
        return group.int(), start.int(), end.int()

    @cached_property
    def places(self) -> Int[Tensor, " rows"]:
        """The index of each row if every tile has 128 rows, with padding."""
        rows = torch.arange(self.num_rows, device=self.bounds.device)
        group = torch.searchsorted(self.bounds[1:].long().contiguous(), rows, right=True)
        return self.first_tile[group] * BLOCK + rows - self.bounds[group]


def quantize_rows(x: Float[Tensor, "*rows dim"]) -> Quantized:
    """Quantize in tiles of 1 x 128; scales [*rows, tiles]."""
    tiles = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).float()
    scales = (tiles.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    values = _to_fp8(tiles / scales.unsqueeze(-1)).flatten(-2)
    return Quantized(values[..., : x.shape[-1]].contiguous(), scales)


def quantize_blocks(weight: Float[Tensor, "groups out dim"], *, has_round_scales: bool = False) -> Quantized:
    """Quantize in blocks of 128 x 128; scales [groups, out blocks, dim blocks].

    has_round_scales: scales are powers of two, the next larger ones.
    """
    *_, out, dim = weight.shape
    blocks = F.pad(weight, (0, -dim % BLOCK, 0, -out % BLOCK)).float()
    blocks = blocks.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [groups, rows, 128, columns, 128]
    scales = (blocks.abs().amax((-3, -1)) / LARGEST).clamp(min=SMALLEST_SCALE)
    if has_round_scales:
        scales = scales.log2().ceil().exp2()
    values = _to_fp8(blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return Quantized(values[..., :out, :dim].contiguous(), scales)


def transpose(weight: Quantized) -> Quantized:
    """The transposed weight with the same blocks, contiguous in memory."""
    return Quantized(weight.values.transpose(1, 2).contiguous(), weight.scales.transpose(1, 2).contiguous())


def quantize_columns(x: Float[Tensor, "rows dim"], groups: RowGroups) -> Quantized:
    """Quantize in tiles of 128 x 1 that never cross groups.

    values are transposed, [dim, rows]; scales [tiles, dim].
    """
    padded = x.new_zeros(groups.num_tiles * BLOCK, x.shape[1], dtype=torch.float32)
    padded[groups.places] = x.float()
    tiles = padded.unflatten(0, (groups.num_tiles, BLOCK))
    scales = (tiles.abs().amax(1) / LARGEST).clamp(min=SMALLEST_SCALE)
    values = _to_fp8(tiles / scales[:, None]).flatten(0, 1)
    # On some devices index_select works for bytes but not for 8-bit floats.
    picked = values.view(torch.uint8).index_select(0, groups.places)
    return Quantized(picked.T.contiguous().view(FP8), scales)


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def dequantize_rows(x: Quantized) -> Float[Tensor, "rows dim"]:
    """The float32 values of a result of `quantize_rows`."""
    scales = x.scales.repeat_interleave(BLOCK, -1)[..., : x.values.shape[-1]]
    return x.values.float() * scales


def dequantize_blocks(weight: Quantized) -> Float[Tensor, "groups out dim"]:
    scales = weight.scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return weight.values.float() * scales[..., : weight.values.shape[-2], : weight.values.shape[-1]]


def dequantize_columns(x: Quantized, groups: RowGroups) -> Float[Tensor, "dim rows"]:
    scales = x.scales.index_select(0, groups.places.div(BLOCK, rounding_mode="floor"))
    return x.values.float() * scales.T


class Kernels:
    """Quantization and 8-bit products in plain torch: the reference for GPU kernels."""

    name = "the slow reference"
    quantize_rows = staticmethod(quantize_rows)
    quantize_columns = staticmethod(quantize_columns)

    def quantize_blocks(self, weight: Float[Tensor, "groups out dim"]) -> Quantized:
        return quantize_blocks(weight)

    def product(
        self, x: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
    ) -> Float[Tensor, "rows out"]:
        """Multiply every row by its group's weight: [rows, in], [groups, out, in] -> [rows, out]."""
        rows, weights = dequantize_rows(x), dequantize_blocks(weight)
        parts = rows.split(groups.bounds.diff().tolist())
        return torch.cat([part @ w.T for part, w in zip(parts, weights)]).to(dtype)

    def outer(self, grads: Quantized, x: Quantized, groups: RowGroups) -> Float32[Tensor, "groups out dim"]:
        """Weight gradients per group, float32 [groups, out, in]: sums over a group's rows.

        grads and x come from `quantize_columns` of [rows, out] and [rows, in].
        """
        sizes = groups.bounds.diff().tolist()
        pairs = zip(
            dequantize_columns(grads, groups).split(sizes, dim=1), dequantize_columns(x, groups).split(sizes, dim=1)
        )
        return torch.stack([a @ b.T for a, b in pairs])


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups, kernels: Kernels) -> Tensor:
        ctx.groups, ctx.kernels = groups, kernels
        ctx.save_for_backward(x, weight)
        return kernels.product(kernels.quantize_rows(x), kernels.quantize_blocks(weight), groups, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        groups, kernels = ctx.groups, ctx.kernels
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            blocks = transpose(kernels.quantize_blocks(weight))
            grad_x = kernels.product(kernels.quantize_rows(grad), blocks, groups, x.dtype)
        if ctx.needs_input_grad[1]:
            columns = kernels.quantize_columns(grad, groups), kernels.quantize_columns(x, groups)
            grad_weight = kernels.outer(*columns, groups).to(weight.dtype)
        return grad_x, grad_weight, None, None


def multiply(
    x: Float[Tensor, "rows dim"], weight: Float[Tensor, "groups out dim"], groups: RowGroups, kernels: Kernels
) -> Float[Tensor, "rows out"]:
    """Multiply every row by the weight of its group in 8 bits; in the dtype of x."""
    return _Multiply.apply(x, weight, groups, kernels)


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits, with the weights of another layer."""

    def __init__(self, base: nn.Linear, kernels: Kernels) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.kernels = base.weight, base.bias, kernels

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        out = product(x, self)
        return out if self.bias is None else out + self.bias


def product(x: Float[Tensor, "*rows in"], layer: nn.Linear) -> Float[Tensor, "*rows out"]:
    """x times the weight of a layer, without bias; in 8 bits if the layer has kernels."""
    kernels = getattr(layer, "kernels", None)
    if kernels is None:
        return F.linear(x, layer.weight)
    rows = x.reshape(-1, x.shape[-1])
    out = multiply(rows, layer.weight[None], RowGroups.one(len(rows), rows.device), kernels)
    return out.view(*x.shape[:-1], out.shape[1])


class Fp8Experts(Experts):
    """Experts that multiply in 8 bits, with the weights of other experts."""

    def __init__(self, base: Experts, kernels: Kernels) -> None:
        self.share_weights_of(base)
        self.kernels, self.use_grouped_mm = kernels, True

    def forward(
        self,
        x: Float[Tensor, "rows dim"],
        counts: Int[Tensor, " experts"],
        routing: Routing,
        tokens: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows dim"]:
        assert routing.row_multiple is None, "8-bit experts are for training only"
        groups = RowGroups.of(counts, len(x))
        times = lambda rows, name: multiply(rows, self.matrix(name).contiguous(), groups, self.kernels)
        return self._gated_mlp(x, counts, times)


def use_fp8(blocks: nn.Module, kernels: Kernels) -> int:
    """Replace the linear layers and experts of blocks, except routers; returns how many."""
    count = 0
    for path, module in list(blocks.named_modules()):
        if isinstance(module, nn.Linear):
            layer: nn.Module = Fp8Linear(module, kernels)
        elif isinstance(module, Experts):
            layer = Fp8Experts(module, kernels)
        else:
            continue
        parent, _, name = path.rpartition(".")
        blocks.get_submodule(parent).add_module(name, layer)
        count += 1
    return count
