"""Recurrent mixers by chunks against one step per token, with documents of every length."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from stretto_families.mixers.documents import Documents
from stretto_families.mixers.gated_delta import gated_delta_rule
from stretto_families.mixers.mamba2 import mamba2_scan

BOUNDS = [(0, 1), (0, 16), (0, 64, 128), (0, 3, 3, 70, 71, 135, 200, 350), (0, 300, 310, 500)]


def step_by_step(q, k, v, log_decay, beta, bounds):
    """The rule as its equation stands, token by token."""
    out = []
    for start, end in pairwise(bounds):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for t in range(start, end):
            state = state * log_decay[t].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - known))
            out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


def mamba2_step_by_step(x, b, c, log_decay, bounds):
    """The recurrence as its equation stands, token by token; heads of a group share b and c."""
    b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], dim=1) for part in (b, c))
    out = []
    for start, end in pairwise(bounds):
        state = x.new_zeros(x.shape[1], b.shape[2], x.shape[2])
        for t in range(start, end):
            added = torch.einsum("hk,hv->hkv", b[t], x[t])
            state = state * log_decay[t].exp()[:, None, None] + added
            out.append(torch.einsum("hk,hkv->hv", c[t], state))
    return torch.stack(out)


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def assert_equal_with_gradients(got, expected, inputs, others, weights):
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-5)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("bounds", BOUNDS)
def test_the_gated_delta_rule_by_chunks_is_that_by_tokens(bounds):
    torch.manual_seed(0)
    num = bounds[-1]
    q, k = (F.normalize(torch.randn(num, 3, 8), dim=-1) for _ in range(2))
    v, log_decay, beta = torch.randn(num, 3, 5), -torch.rand(num, 3), torch.rand(num, 3)
    mine, other = (leaves(*(tensor.clone() for tensor in (q, k, v, log_decay, beta))) for _ in range(2))
    got = gated_delta_rule(*mine, Documents(bounds, q.device).chunks)
    assert_equal_with_gradients(got, step_by_step(*other, bounds), mine, other, torch.randn(num, 3, 5))


def test_strong_decay_neither_overflows_nor_loses_gradients():
    q = torch.ones(130, 1, 2).requires_grad_()
    log_decay = torch.full((130, 1), -40.0).requires_grad_()
    out = gated_delta_rule(q, q, q, log_decay, torch.ones(130, 1), Documents((0, 130), q.device).chunks)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
    assert log_decay.grad.isfinite().all()


@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_convolution_sees_its_document_only(bounds):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(bounds[-1], 6), torch.randn(6, 1, 4), torch.randn(6)
    got = Documents(bounds, x.device).convolve(x, weight, bias)
    expected = torch.cat(
        [F.conv1d(F.pad(x[a:b].T, (3, 0))[None], weight, bias, groups=6)[0].T for a, b in pairwise(bounds) if b > a]
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_empty_row_has_no_results():
    documents = Documents((0,), torch.device("cpu"))
    x = torch.zeros(0, 2, 3)
    assert gated_delta_rule(x, x, x, x[..., 0], x[..., 0], documents.chunks).shape == (0, 2, 3)
    assert documents.convolve(torch.zeros(0, 6), torch.zeros(6, 1, 4), None).shape == (0, 6)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_mamba2_by_chunks_is_that_by_tokens(bounds):
    torch.manual_seed(0)
    num = bounds[-1]
    x, b, c = torch.randn(num, 4, 5), torch.randn(num, 2, 6), torch.randn(num, 2, 6)
    log_decay = -torch.rand(num, 4)
    mine, other = (leaves(*(tensor.clone() for tensor in (x, b, c, log_decay))) for _ in range(2))
    got = mamba2_scan(*mine, Documents(bounds, x.device).chunks)
    expected = mamba2_step_by_step(*other, bounds)
    assert_equal_with_gradients(got, expected, mine, other, torch.randn(num, 4, 5))
