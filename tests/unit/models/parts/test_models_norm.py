"""The norm and its gradient equal torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from stretto.models.decoder import RMSNorm
from stretto.models.parts import norm
from stretto.models.parts.norm import _RMSNorm, rms_norm

SHAPES = pytest.mark.parametrize("shape", [(7, 16), (5, 4, 8), (1, 3), (0, 8), (300, 2, 48)])
EPS = 1e-6


@pytest.fixture(params=[True, False], ids=["kernels", "torch"], autouse=True)
def use_kernels(request, monkeypatch):
    """With kernels for a CPU, where rows are as long as they take them, and without."""
    if not request.param:
        monkeypatch.setattr(norm, "find_row_kernels", lambda *tensors: None)
    return request.param


def tensors(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(3).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def torchs_norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@SHAPES
def test_the_result_is_that_of_torchs_norm(shape, use_kernels):
    x, weight, _ = tensors(shape)
    for w in (weight, None):
        ours = rms_norm(x, w, EPS)
        if use_kernels:
            torch.testing.assert_close(ours, torchs_norm(x, w, EPS), atol=1e-6, rtol=2e-6)
        else:
            assert torch.equal(ours, torchs_norm(x, w, EPS))
        with torch.no_grad():
            assert torch.equal(rms_norm(x, w, EPS), ours)


@SHAPES
def test_gradients_are_those_of_torchs_norm(shape):
    x, weight, probe = tensors(shape)
    for w in (weight, None):
        inputs = [tensor for tensor in (x, w) if tensor is not None]
        ours, theirs = (torch.autograd.grad(f(x, w, EPS), inputs, probe) for f in (rms_norm, torchs_norm))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=2e-6)


def test_gradients_are_the_slopes_of_the_function():
    x, weight, _ = tensors((4, 6), torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, EPS, None), (x, weight))
    assert torch.autograd.gradcheck(lambda x: _RMSNorm.apply(x, None, EPS, None), (x,))
    assert torch.autograd.gradcheck(lambda x: _RMSNorm.apply(x, weight.detach(), EPS, None), (x,))
    assert torch.autograd.gradcheck(lambda w: _RMSNorm.apply(x.detach(), w, EPS, None), (weight,))


def test_gradients_of_a_row_far_from_zero_are_as_exact_as_torchs():
    """The mean that is subtracted and added back must not leave a rounding error."""
    x, weight, probe = (tensor.detach() + 100 for tensor in tensors((16, 64)))
    double = x.double().requires_grad_()
    inputs = x.requires_grad_()
    (exact,) = torch.autograd.grad(torchs_norm(double, weight.double(), EPS), [double], probe.double())
    errors = []
    for f in (rms_norm, torchs_norm):
        (found,) = torch.autograd.grad(f(inputs, weight, EPS), [inputs], probe)
        errors.append((found - exact).abs().max())
    assert errors[0] <= 4 * errors[1]


def test_a_gradient_that_is_no_plain_block_of_memory_is_understood():
    x, weight, probe = tensors((6, 8))
    for grad in (probe.t().contiguous().t(), probe[:1].expand(6, 8)):
        ours, theirs = (torch.autograd.grad(f(x, weight, EPS), [x, weight], grad) for f in (rms_norm, torchs_norm))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(use_reentrant):
    x, weight, probe = tensors((6, 8))
    whole = torch.autograd.grad(rms_norm(x, weight, EPS), [x, weight], probe)
    again = checkpoint(rms_norm, x, weight, EPS, use_reentrant=use_reentrant)
    again.backward(probe)
    assert torch.equal(x.grad, whole[0]) and torch.equal(weight.grad, whole[1])


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_norm_is_the_same(dtype):
    module = RMSNorm(8, EPS).to(dtype)
    x, _, probe = tensors((6, 8), dtype)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(f(x), [x, module.weight], probe) for f in (module, compiled)]
    assert torch.equal(module(x), compiled(x))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_is_computed_in_float32():
    module = RMSNorm(8, EPS).bfloat16()
    x, weight, probe = tensors((6, 8), torch.bfloat16)
    module.weight.data.copy_(weight.data)
    out = module(x)
    expected = module.weight * torchs_norm(x.float(), None, EPS).bfloat16()
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
    for a, b in zip(*(torch.autograd.grad(y, [x, module.weight], probe) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)
