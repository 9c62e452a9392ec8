"""8-bit matrix products on GPUs with triton, or with DeepGEMM if it is installed.

Both need compute capability 9.0 (Hopper) or newer. DeepGEMM's grouped products need groups padded to whole tiles
and inner sizes of whole blocks, and its scales are float32 on Hopper only. So other shapes, other GPUs and the
gradients of weights use the triton kernels. Import this module only if triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# What triton compiles has no types of Python.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.models.fp8.reference import BLOCK, FP8, LARGEST, SMALLEST_SCALE, Kernels, Quantized, RowGroups

if TYPE_CHECKING:
    from jaxtyping import Float, Float32

NUM_WARPS, NUM_STAGES = 8, 3
ROWS = 32
"""Rows that one triton program quantizes."""


@triton.jit
def _scaled(x, scale, LARGEST: tl.constexpr):
    return tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)


@triton.jit
def _quantize_rows_kernel(
    x, values, scales, num_rows, dim,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of one column of tiles."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    places = rows.to(tl.int64)[:, None] * dim + columns[None, :]
    numbers = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=1) / LARGEST, SMALLEST)
    tl.store(values + places, _scaled(numbers, scale[:, None], LARGEST).to(values.dtype.element_ty), mask=mask)
    tl.store(scales + rows.to(tl.int64) * tl.cdiv(dim, BLOCK) + block, scale, mask=rows < num_rows)


@triton.jit
def _quantize_blocks_kernel(
    weight, values, scales, num_out, dim,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Quantize one block of one group's weight."""
    group, out_block, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    outs = out_block * BLOCK + tl.arange(0, BLOCK)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = (outs < num_out)[:, None] & (columns < dim)[None, :]
    places = group * num_out * dim + outs.to(tl.int64)[:, None] * dim + columns[None, :]
    numbers = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(numbers), axis=1), axis=0) / LARGEST, SMALLEST)
    tl.store(values + places, _scaled(numbers, scale, LARGEST).to(values.dtype.element_ty), mask=mask)
    tl.store(scales + (group * tl.cdiv(num_out, BLOCK) + out_block) * tl.cdiv(dim, BLOCK) + block, scale)


@triton.jit
def _quantize_columns_kernel(
    x, values, scales, start_of, end_of, num_rows, dim,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Quantize some columns of one tile of rows, stored transposed.

    An empty tile gets the smallest scale.
    """
    tile = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.load(start_of + tile) + tl.arange(0, BLOCK)
    mask = (rows < tl.load(end_of + tile))[:, None] & (columns < dim)[None, :]
    numbers = tl.load(x + rows.to(tl.int64)[:, None] * dim + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=0) / LARGEST, SMALLEST)
    places = columns.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(values + places, _scaled(numbers, scale[None, :], LARGEST).to(values.dtype.element_ty), mask=mask)
    tl.store(scales + tile.to(tl.int64) * dim + columns, scale, mask=columns < dim)


@triton.jit
def _product_kernel(
    x, x_scales, weight, weight_scales, out, group_of, start_of, end_of, num_out, dim,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows times one block of outputs.

    A sum over blocks of dim: the 8-bit product times both scales.
    """
    tile, out_block = tl.program_id(0), tl.program_id(1)
    group = tl.load(group_of + tile).to(tl.int64)
    start, end = tl.load(start_of + tile), tl.load(end_of + tile)
    if start < end:
        rows = start + tl.arange(0, BLOCK)
        columns = out_block * BLOCK + tl.arange(0, BLOCK)
        is_row, is_column = rows < end, columns < num_out
        num_blocks, num_out_blocks = tl.cdiv(dim, BLOCK), tl.cdiv(num_out, BLOCK)
        x_rows = x + rows.to(tl.int64)[:, None] * dim
        w_columns = weight + group * num_out * dim + columns.to(tl.int64)[None, :] * dim
        w_scale = weight_scales + (group * num_out_blocks + out_block) * num_blocks
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for block in range(0, num_blocks):
            places = block * BLOCK + tl.arange(0, BLOCK)
            is_place = places < dim
            a = tl.load(x_rows + places[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
            b = tl.load(w_columns + places[:, None], mask=is_place[:, None] & is_column[None, :], other=0.0)
            scale = tl.load(x_scales + rows.to(tl.int64) * num_blocks + block, mask=is_row, other=0.0)
            total += tl.dot(a, b) * (scale * tl.load(w_scale + block))[:, None]
        places = rows.to(tl.int64)[:, None] * num_out + columns[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _outer_kernel(
    grads, grad_scales, x, x_scales, out, bounds, first_tile, num_rows, num_out, dim,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one group's weight gradient: sum over its tiles of rows."""
    group = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ins = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_out, is_in = outs < num_out, ins < dim
    start, end = tl.load(bounds + group), tl.load(bounds + group + 1)
    tile = tl.load(first_tile + group).to(tl.int64)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for row in range(start, end, BLOCK):
        rows = row + tl.arange(0, BLOCK)
        is_row = rows < end
        a = tl.load(
            grads + outs.to(tl.int64)[:, None] * num_rows + rows[None, :],
            mask=is_out[:, None] & is_row[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + ins.to(tl.int64)[None, :] * num_rows + rows[:, None],
            mask=is_row[:, None] & is_in[None, :], other=0.0,
        )  # fmt: skip
        a_scale = tl.load(grad_scales + tile * num_out + outs, mask=is_out, other=0.0)
        b_scale = tl.load(x_scales + tile * dim + ins, mask=is_in, other=0.0)
        total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        tile += 1
    places = group.to(tl.int64) * num_out * dim + outs.to(tl.int64)[:, None] * dim + ins[None, :]
    tl.store(out + places, total, mask=is_out[:, None] & is_in[None, :])


class Triton(Kernels):
    """Kernels in triton, for any shape."""

    name = "triton"

    def quantize_rows(self, x: Float[Tensor, "rows dim"]) -> Quantized:
        x = x.contiguous()
        num_rows, dim = x.shape
        values, scales = (
            torch.empty_like(x, dtype=FP8),
            x.new_empty(num_rows, triton.cdiv(dim, BLOCK), dtype=torch.float32),
        )
        if num_rows:
            grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(dim, BLOCK))
            _quantize_rows_kernel[grid](
                x, values, scales, num_rows, dim,
                ROWS=ROWS, BLOCK=BLOCK, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE,
            )  # fmt: skip
        return Quantized(values, scales)

    def quantize_blocks(self, weight: Float[Tensor, "groups out dim"]) -> Quantized:
        weight = weight.contiguous()
        num_groups, num_out, dim = weight.shape
        grid = (num_groups, triton.cdiv(num_out, BLOCK), triton.cdiv(dim, BLOCK))
        values, scales = torch.empty_like(weight, dtype=FP8), weight.new_empty(grid, dtype=torch.float32)
        _quantize_blocks_kernel[grid](
            weight, values, scales, num_out, dim,
            BLOCK=BLOCK, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, num_warps=NUM_WARPS,
        )  # fmt: skip
        return Quantized(values, scales)

    def quantize_columns(self, x: Float[Tensor, "rows dim"], groups: RowGroups) -> Quantized:
        x = x.contiguous()
        num_rows, dim = x.shape
        values = x.new_empty(dim, num_rows, dtype=FP8)
        scales = x.new_empty(groups.num_tiles, dim, dtype=torch.float32)
        if groups.num_tiles:
            _, start, end = groups.tiles
            _quantize_columns_kernel[(groups.num_tiles, triton.cdiv(dim, ROWS))](
                x, values, scales, start, end, num_rows, dim,
                COLUMNS=ROWS, BLOCK=BLOCK, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE,
            )  # fmt: skip
        return Quantized(values, scales)

    def product(
        self, x: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
    ) -> Float[Tensor, "rows out"]:
        num_rows, dim = x.values.shape
        num_out = weight.values.shape[1]
        out = x.values.new_empty(num_rows, num_out, dtype=dtype)
        grid = (groups.num_tiles, triton.cdiv(num_out, BLOCK))
        if num_rows:
            _product_kernel[grid](
                x.values, x.scales, weight.values, weight.scales, out, *groups.tiles, num_out, dim,
                BLOCK=BLOCK, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
            )  # fmt: skip
        return out

    def outer(self, grads: Quantized, x: Quantized, groups: RowGroups) -> Float32[Tensor, "groups out dim"]:
        (num_out, num_rows), dim = grads.values.shape, x.values.shape[0]
        out = x.scales.new_empty(groups.num_groups, num_out, dim)
        grid = (groups.num_groups, triton.cdiv(num_out, BLOCK), triton.cdiv(dim, BLOCK))
        _outer_kernel[grid](
            grads.values, grads.scales, x.values, x.scales, out, groups.bounds, groups.first_tile,
            num_rows, num_out, dim, BLOCK=BLOCK, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
        return out


class DeepGemm(Triton):
    """DeepGEMM's kernels for the shapes they have, ours for the rest.

    Source: https://github.com/deepseek-ai/DeepGEMM, fp8_gemm_nt and m_grouped_fp8_gemm_nt_contiguous (2.x).
    """

    name = "DeepGEMM"

    def __init__(self, library: Any) -> None:
        self._library = library

    def product(
        self, x: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype
    ) -> Float[Tensor, "rows out"]:
        (num_rows, dim), num_out = x.values.shape, weight.values.shape[1]
        if dim % BLOCK or num_out % BLOCK or not num_rows or dtype != torch.bfloat16:
            return super().product(x, weight, groups, dtype)
        if groups.num_groups == 1:
            out = x.values.new_empty(num_rows, num_out, dtype=dtype)
            whole = Quantized(weight.values[0], weight.scales[0])
            self._library.fp8_gemm_nt(tuple(x), tuple(whole), out)
            return out
        padded_rows = groups.num_tiles * BLOCK
        values = torch.zeros(padded_rows, dim, dtype=torch.uint8, device=x.values.device)
        values[groups.places] = x.values.view(torch.uint8)
        scales = x.scales.new_ones(padded_rows, x.scales.shape[1])
        scales[groups.places] = x.scales
        group, start, end = groups.tiles
        indices = torch.where(start < end, group, -1).repeat_interleave(BLOCK)
        out = x.values.new_empty(padded_rows, num_out, dtype=dtype)
        self._library.m_grouped_fp8_gemm_nt_contiguous((values.view(FP8), scales), tuple(weight), out, indices)
        return out.index_select(0, groups.places)


def find_kernels(device: torch.device) -> Triton:
    """DeepGEMM's kernels if it is installed and this is a Hopper GPU, else ours."""
    try:
        import deep_gemm
    except ImportError:
        return Triton()
    has_all = all(hasattr(deep_gemm, n) for n in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"))
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return DeepGemm(deep_gemm) if has_all and is_hopper else Triton()
