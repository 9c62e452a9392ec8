"""8-bit products: their error, the separation of groups, and that only products change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases.kernels.fp8 import assert_kernels_agree

from stretto.models.fp8.reference import (
    BLOCK,
    FP8,
    LARGEST,
    Fp8Linear,
    Kernels,
    RowGroups,
    dequantize_blocks,
    dequantize_columns,
    dequantize_rows,
    multiply,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off_by(got, want) -> float:
    return float(((got - want).norm() / want.norm()).detach())


@pytest.mark.parametrize("shape", [(5, 256), (3, 100), (200, 300)])
def test_rounded_values_are_off_by_less_than_a_sixteenth_of_their_tile(shape):
    x = random(*shape) * torch.logspace(-4, 4, shape[0])[:, None]
    rounded = quantize_rows(x)
    assert rounded.values.dtype == FP8 and rounded.scales.shape == (shape[0], -(-shape[1] // BLOCK))
    assert float(rounded.values.float().abs().max()) <= LARGEST
    largest = rounded.scales.repeat_interleave(BLOCK, 1)[:, : shape[1]] * LARGEST
    assert ((dequantize_rows(rounded) - x).abs() <= x.abs() / 16 + largest * 2e-5).all()
    groups = RowGroups.of(torch.tensor([shape[0] - 2, 0, 2]), shape[0])
    assert ((dequantize_columns(quantize_columns(x, groups), groups).T - x).norm() / x.norm()) < 0.03
    weight = random(2, *shape)
    assert off_by(dequantize_blocks(quantize_blocks(weight)), weight) < 0.03


def test_a_tile_of_zeros_and_the_largest_values_stay_what_they_are():
    x = torch.zeros(2, 256)
    x[1, :128], x[1, 130] = 3e38, -7.0
    assert torch.allclose(dequantize_rows(quantize_rows(x)), x, rtol=1e-6)


def test_product_and_both_gradients_are_off_by_about_0_037():
    x, weight, grad = random(512, 384), random(256, 384, seed=1), random(512, 256, seed=2)
    x.requires_grad_()
    weight.requires_grad_()
    out = multiply(x, weight[None], RowGroups.one(512, x.device), Kernels())
    out.backward(grad)
    for got, want in ((out, x @ weight.T), (x.grad, grad @ weight), (weight.grad, grad.T @ x)):
        assert 0.03 < off_by(got, want) < 0.042


def test_one_tensor_wide_scale_would_be_far_worse_where_rows_differ():
    """The control: blocks are needed to separate small rows from large ones."""
    x, weight = random(256, 256), random(128, 256, seed=1)
    x = x * torch.logspace(-5, 5, 256)[:, None]
    out = multiply(x, weight[None], RowGroups.one(256, x.device), Kernels())
    scale = x.abs().max() / LARGEST
    coarse = ((x / scale).to(FP8).float() * scale) @ weight.T
    small = slice(0, 64)
    want = x @ weight.T
    assert off_by(out[small], want[small]) < 0.042 < 0.5 < off_by(coarse[small], want[small])


def test_the_reference_sums_block_by_block_as_a_gpu_does():
    x, weight = quantize_rows(random(40, 300)), quantize_blocks(random(1, 150, 300, seed=1))
    total = torch.zeros(40, 150)
    for block in range(3):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = x.values[:, part].float() @ weight.values[0, :, part].float().T
        columns = weight.scales[0, :, block].repeat_interleave(BLOCK)[:150]
        total += partial * x.scales[:, block, None] * columns
    out = Kernels().product(x, weight, RowGroups.one(40, torch.device("cpu")), torch.float32)
    torch.testing.assert_close(out, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counts", [[0, 130, 1, 0, 128], [5, 5, 5, 5, 5], [0, 0, 0, 0, 300]])
def test_each_group_is_computed_as_if_it_were_alone(counts):
    num_rows = sum(counts)
    x, weight, grad = random(num_rows, 200), random(5, 140, 200, seed=1), random(num_rows, 140, seed=2)
    x.requires_grad_()
    weight.requires_grad_()
    out = multiply(x, weight, RowGroups.of(torch.tensor(counts), num_rows), Kernels())
    out.backward(grad)
    for group, rows in enumerate(torch.arange(num_rows).split(counts)):
        if not len(rows):
            assert not weight.grad[group].any()
            continue
        own, w = x.detach()[rows].requires_grad_(), weight.detach()[group].requires_grad_()
        alone = multiply(own, w[None], RowGroups.one(len(rows), own.device), Kernels())
        alone.backward(grad[rows])
        pairs = ((out[rows], alone), (x.grad[rows], own.grad), (weight.grad[group], w.grad))
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_no_rows_give_no_rows_and_gradients_of_zeros():
    layer = Fp8Linear(torch.nn.Linear(160, 130), Kernels())
    out = layer(torch.zeros(0, 160, requires_grad=True))
    out.sum().backward()
    assert out.shape == (0, 130) and not layer.weight.grad.any()


def test_tiles_cover_every_row_once_and_never_two_groups():
    for counts in ([0, 130, 1, 0, 128], [1], [256], [0, 0, 3]):
        groups = RowGroups.of(torch.tensor(counts), sum(counts))
        seen = []
        for group, start, end in zip(*(part.tolist() for part in groups.tiles)):
            rows = range(start, min(start + BLOCK, end))
            assert all(groups.bounds[group] <= row < groups.bounds[group + 1] for row in rows)
            seen += rows
        assert seen == list(range(sum(counts)))
        assert len(set(groups.places.tolist())) == sum(counts)
        assert sum(counts) == 0 or int(groups.places.max()) < groups.num_tiles * BLOCK


def test_a_layer_has_the_weights_and_the_bias_of_the_one_it_stands_for():
    base = torch.nn.Linear(160, 130)
    layer = Fp8Linear(base, Kernels())
    assert layer.weight is base.weight and layer.state_dict().keys() == base.state_dict().keys()
    x = random(3, 7, 160)
    assert off_by(layer(x), base(x)) < 0.042
    frozen = Fp8Linear(torch.nn.Linear(160, 130).requires_grad_(False), Kernels())
    x.requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None and frozen.weight.grad is None
    assert off_by(x.grad, F.linear(torch.ones(21, 130), frozen.weight.T).view_as(x)) < 0.042


def test_the_reference_agrees_with_itself():
    assert_kernels_agree(Kernels(), "cpu")
