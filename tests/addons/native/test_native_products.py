"""Products in C against float64, and that no row's bits depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto_native import library
from stretto_native.products import Products

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((8, 16), (43, 64), (960, 576), (100, 784), (64, 1600))
"""Outputs and inputs: some are no multiple of a tile, and some inputs have more than one block."""


@pytest.fixture(scope="module")
def products() -> Products:
    found = library.find_library()
    if found is None or not found.has_products():
        pytest.skip("needs a C compiler and AVX-512")
    return Products(found)


def inputs(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, weight, bias and residual."""
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, shape[1]), shape, shape[:1], (rows, shape[0]))
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 97, 200])
def test_products_are_exact_but_for_rounding(products, shape, rows, dtype):
    x, weight, bias, residual = inputs(shape, rows, dtype)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(products.logits(x, weight).double(), exact, atol=2e-4, rtol=1e-5)
    expected = exact + bias.double() + residual.double()
    tolerance = {"atol": 2e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.3, "rtol": 2**-7}
    torch.testing.assert_close(products(x, weight, bias, residual).double(), expected, **tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_rounded_as_a_linear_layer_and_a_sum_round(products, shape):
    x, weight, bias, residual = inputs(shape, 40, torch.bfloat16)
    plain = (x.double() @ weight.double().T + bias.double()).float().bfloat16()
    assert (products(x, weight, bias) != plain).float().mean() < 1e-3
    added = residual + products(x, weight, bias)
    assert torch.equal(products(x, weight, bias, residual), added)
    assert (F.linear(x, weight, bias) != plain).float().mean() < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_equal_bits_among_any_number_of_rows_and_threads(products, shape, dtype):
    x, weight, bias, residual = inputs(shape, 210, dtype)
    whole = products(x, weight, bias, residual)
    for start, stop in ((0, 1), (3, 5), (7, 10), (100, 104), (50, 148), (209, 210)):
        part = products(x[start:stop].clone(), weight, bias, residual[start:stop].clone())
        assert torch.equal(part, whole[start:stop])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(products(x, weight, bias, residual), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(products, dtype):
    x, weight, *_ = inputs((16, 32), 4, dtype)
    x[1, 7] = torch.nan
    x[2, 5] = torch.inf
    out = products(x, weight)
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    assert out[[0, 3]].isfinite().all()


def test_weights_that_are_not_supported_are_left_to_torch():
    good = torch.zeros(16, 32)
    for bad in (good.double(), torch.zeros(16, 24), torch.zeros(4, 32), good.T, torch.zeros(8, 32, device="meta")):
        assert Products.find([good, bad]) is None
