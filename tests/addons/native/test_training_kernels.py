"""The training step's kernels in C against the same in float64, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stretto.models.attention import packed_attention
from stretto.models.parts.mlp import gate_product
from stretto.models.parts.norm import rms_norm
from stretto.models.parts.rope import Angles, rotate
from stretto.models.segments import SegmentTree
from stretto_native import library, training
from stretto_native.training import NativeAttention, TrainingKernels, find_row_kernels


@pytest.fixture(scope="module")
def kernels() -> TrainingKernels:
    if library.find_library() is None:
        pytest.skip("needs a C compiler")
    return TrainingKernels()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_like_float64(fast, slow, inputs, atol=2e-6):
    """Results and gradients of both, the slow one in float64."""
    outs = fast(*inputs), slow(*(x.double() for x in inputs))
    probe = random(*outs[0].shape, seed=9).detach()
    (mine, exact) = ([out, *torch.autograd.grad(out, inputs, probe.to(out.dtype))] for out in outs)
    for found, wanted in zip(mine, exact, strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=1e-5)


def test_gate(kernels):
    gate = torch.cat((random(5, 48).detach() * 20, torch.tensor([[-200.0, 200.0, -90.0, 0.0] * 12])))
    inputs = (gate.requires_grad_(), random(6, 48, seed=1))
    assert_like_float64(gate_product, lambda g, u: F.silu(g) * u, inputs, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(gate_product(*inputs), kernels.gate_product(*inputs))


@pytest.mark.parametrize("dim", [16, 48])
def test_rotation_and_back(kernels, dim):
    x, cos, sin = (random(7, n, dim, seed=n).detach() for n in (3, 1, 1))
    for sign in (1, -1):
        exact = x.double() * cos + sign * x.double().roll(dim // 2, -1) * sin
        torch.testing.assert_close(kernels.rotate(x, cos, sin, sign).double(), exact, atol=1e-6, rtol=1e-6)


def reference(bounds, parents, heads):
    """Attention with one mask over the whole row."""
    tokens = torch.arange(bounds[-1])
    segment = torch.bucketize(tokens, torch.tensor(bounds[1:]), right=True)
    mask = (segment[:, None] == segment[None]) & (tokens[:, None] >= tokens[None])
    for child, parent in enumerate(parents):
        while parent >= 0:
            mask |= (segment[:, None] == child) & (segment[None] == parent)
            parent = parents[parent]

    def attend(q, k, v):
        k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    return attend


LAYOUTS = {
    "one token": ([1], [-1]),
    "documents": ([3, 1, 17, 64, 4, 33], [-1] * 6),
    "an empty one": ([5, 0, 16], [-1] * 3),
    "prefixes": ([3, 20, 2, 7, 5, 40, 1], [-1, -1, 0, 1, 1, 0, -1]),
    "a tree": ([3, 20, 17, 7, 0, 40, 1, 9, 6, 5], [-1, -1, 1, 2, 1, 4, 2, 3, 5, 0]),
}


@pytest.mark.parametrize("shape", [(4, 2, 16), (6, 2, 64), (2, 1, 128), (3, 3, 48)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention(kernels, shape, layout):
    (heads, kv_heads, dim), (lengths, parents) = shape, LAYOUTS[layout]
    bounds = np.cumsum([0, *lengths])
    attend = NativeAttention(SegmentTree.of(bounds, parents))
    inputs = [random(bounds[-1], n, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    slow = reference(bounds.tolist(), parents, heads)
    assert_like_float64(attend, slow, inputs, atol=1e-5)


def test_large_scores_neither_overflow_nor_lose_the_largest(kernels):
    bounds = np.array([0, 40])
    q, k, v = (random(40, 2, 16, seed=i).detach() for i in range(3))
    q, k = (60 * q).requires_grad_(), k.requires_grad_()
    attend = NativeAttention(SegmentTree.of(bounds))
    inputs = [q, k, v.requires_grad_()]
    slow = reference([0, 40], [-1], 2)
    assert_like_float64(attend, slow, inputs, atol=5e-3)  # of gradients near 100


def test_a_number_that_is_none_stays_in_its_document(kernels):
    q, k, v = (random(20, 2, 16, seed=i).detach() for i in range(3))
    k[3] = torch.nan
    out = NativeAttention(SegmentTree.of([0, 10, 20]))(q, k, v)
    assert out[:3].isfinite().all() and out[3:10].isnan().all() and out[10:].isfinite().all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_threads_give_the_same_bits(kernels, layout):
    lengths, parents = LAYOUTS[layout]
    bounds = np.cumsum([0, *lengths])
    attend = NativeAttention(SegmentTree.of(bounds, parents))
    inputs = [random(bounds[-1], n, 16, seed=i) for i, n in enumerate((4, 2, 2))]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("two_threads")
def test_the_norm_of_two_threads(kernels):
    x, weight = random(301, 48), random(48, seed=1)
    inverse = kernels.rms_norm(x, weight, 1e-6)[1]
    grads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        grads.append(kernels.rms_norm_backward(x, weight, inverse, torch.ones_like(x), (True, True)))
    assert torch.equal(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-4, rtol=1e-6)


def test_a_document_has_the_same_bits_alone_packed_and_behind_a_shared_prefix(kernels):
    q, k, v = (random(60, 2, 32, seed=i).detach() for i in range(3))
    whole = NativeAttention(SegmentTree.of([0, 60]))(q, k, v)
    rows = torch.cat((torch.arange(20), torch.arange(7), torch.arange(20, 60)))
    cut = NativeAttention(SegmentTree.of([0, 20, 27, 40, 67], [-1, -1, 0, 2]))
    out = cut(q[rows], k[rows], v[rows])
    assert torch.equal(torch.cat((out[:20], out[27:])), whole)


def test_what_the_kernels_cannot_take_is_left_to_torch(monkeypatch):
    x = torch.randn(4, 16)
    if library.find_library() is not None:
        assert find_row_kernels(x, torch.nn.Parameter(x), None) is not None
    for other in (x.double(), x.bfloat16(), x.to("meta"), torch.nn.Buffer(x).as_subclass(Marked)):
        assert find_row_kernels(x, other) is None
    assert find_row_kernels(x[:, :9]) is None
    monkeypatch.setattr(training, "find_library", lambda: None)
    training._kernels.cache_clear()
    assert find_row_kernels(x) is None
    training._kernels.cache_clear()


def test_a_weight_that_is_no_block_of_memory_is_read_by_its_strides(kernels):
    x, columns = random(5, 16), random(16, 3, seed=1)

    def norm(x, columns):
        return F.rms_norm(x, (16,), columns[:, 1], 1e-6)

    assert_like_float64(lambda x, w: rms_norm(x, w[:, 1], 1e-6), norm, (x, columns))


def test_angles_of_all_tokens_at_once_are_left_to_torch():
    """The kernel reads a row of angles for each token, which these do not have."""
    x = random(6, 2, 16).detach()
    cos, sin = random(2, 1, 1, 16, seed=2).detach()
    torch.testing.assert_close(rotate(x, Angles(cos, sin)), x * cos + x.roll(8, -1) * sin)


def test_heads_that_do_not_fit_together_are_not_read_by_the_kernels():
    attend = packed_attention((0, 80))
    q, k, v = (random(80, n, dim, seed=n).detach() for n, dim in ((4, 32), (2, 32), (2, 16)))
    exact = reference([0, 80], [-1], 4)(q.double(), k.double(), v.double())
    torch.testing.assert_close(attend(0, q, k, v).double(), exact, atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="heads"):
        attend(0, random(80, 5, 32), k, k)


class Marked(torch.Tensor):
    """Some other kind of tensor."""
