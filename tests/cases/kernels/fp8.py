"""What every implementation of 8-bit products must give; shared by CPU, interpreter and GPU tests."""

from __future__ import annotations

import torch

from stretto.models.fp8.reference import (
    Kernels,
    Quantized,
    RowGroups,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    transpose,
)

CASES = (([37], 200, 140), ([128], 128, 256), ([0, 130, 1, 0, 64], 256, 128), ([3, 5], 96, 300))
"""(rows of each group, in, out)"""


def assert_kernels_agree(
    kernels, device: str, dtype: torch.dtype = torch.float32, *, is_interpreted: bool = False
) -> None:
    """Rounding, forward, gradient of inputs, gradient of weights: the reference's, up to the order of sums.

    is_interpreted: by triton's interpreter, whose 8-bit rounding loses the carry from 1.96875 to 2.
    """
    reference = Kernels()
    for counts, dim, num_out in CASES:
        generator = torch.Generator().manual_seed(0)
        rows = sum(counts)
        x, weight, grad = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((rows, dim), (len(counts), num_out, dim), (rows, num_out))
        )
        groups = RowGroups.of(torch.tensor(counts, device=device), rows)
        assert_rounded(kernels.quantize_rows(x * 100), quantize_rows(x * 100), is_interpreted)
        assert_rounded(kernels.quantize_blocks(weight), quantize_blocks(weight), is_interpreted)
        assert_rounded(kernels.quantize_columns(grad, groups), quantize_columns(grad, groups), is_interpreted)
        forward = quantize_rows(x), quantize_blocks(weight), groups, dtype
        backward = quantize_rows(grad), transpose(quantize_blocks(weight)), groups, dtype
        outer = quantize_columns(grad, groups), quantize_columns(x, groups), groups
        # A GPU sums 8-bit products with 14 bits of mantissa, so the last bits of float32 are not the reference's.
        tolerance = {"rtol": 2e-2, "atol": 2e-2 * dim**0.5} if dtype == torch.bfloat16 else None
        for name, args in (("product", forward), ("product", backward), ("outer", outer)):
            got, want = getattr(kernels, name)(*args), getattr(reference, name)(*args)
            loose = {"rtol": 1e-2, "atol": 1e-2} if torch.device(device).type == "cuda" else None
            torch.testing.assert_close(got, want, **(tolerance or loose or {"rtol": 1e-4, "atol": 1e-4}))


def assert_rounded(got: Quantized, want: Quantized, loses_carries: bool) -> None:
    """The same scales and, but for a division that may round a tie the other way, the same values."""
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-6, atol=0)
    assert got.values.shape == want.values.shape and got.values.dtype == want.values.dtype
    off = (got.values.float() - want.values.float()).abs()
    if loses_carries:
        off[got.values.float() * 2 == want.values.float()] = 0
    assert (off <= want.values.float().abs() / 8 + 2**-8).all()
    assert (off > 0).float().mean() < 1e-3
