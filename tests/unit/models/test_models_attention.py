"""Packed attention equals one masked attention over the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stretto.models import attention
from stretto.models.attention import MAX_PADDED_KEYS, MAX_SHORT_KEYS, PAD_STEP, PackedLayout, packed_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


@pytest.fixture(params=[8, 16], ids=["torch", "kernels"], autouse=True)
def head_dim(request, monkeypatch):
    """Kernels for a CPU take heads of 16 numbers, and leave those of 8 to torch's operations."""
    monkeypatch.setitem(globals(), "DIM", request.param)


@pytest.fixture
def torch_only(monkeypatch):
    """No kernels for a CPU."""
    monkeypatch.setattr(attention, "find_kernels", lambda _: None)


@pytest.fixture
def flash_only(torch_only, monkeypatch):
    """Use the kernel for long segments only."""
    monkeypatch.setattr(attention, "MAX_SHORT_KEYS", 0)


def masked_attention(q, k, v, mask):
    """Slow reference: every query against every key of the row, then a mask."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    weights = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def segment_mask(bounds, parents=None):
    tokens = torch.arange(bounds[-1])
    segment = torch.bucketize(tokens, torch.tensor(bounds[1:]), right=True)
    mask = (segment[:, None] == segment[None]) & (tokens[:, None] >= tokens[None])
    for child, parent in enumerate(parents or ()):
        while parent >= 0:
            mask |= (segment[:, None] == child) & (segment[None] == parent)
            parent = parents[parent]
    return mask


def random_qkv(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def assert_same_with_gradients(attend, mask):
    qkv = random_qkv(mask.shape[0])
    probe = torch.randn(mask.shape[0], HEADS, DIM, generator=torch.Generator().manual_seed(1))
    results = []
    for out in (attend(0, *qkv), masked_attention(*qkv, mask)):
        results.append([out, *torch.autograd.grad((out * probe).sum(), qkv)])
    for fast, slow in zip(*results):
        torch.testing.assert_close(fast, slow, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    "lengths",
    [[7], [3, 3, 3], [1, 5, 5, 2, 2, 5], [0, 4, 0, 4], [MAX_SHORT_KEYS + 6, MAX_SHORT_KEYS + 6, 9], [1, 1, 1]],
)
def test_packed_attention_equals_masked_attention(lengths):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert_same_with_gradients(packed_attention(tuple(bounds)), segment_mask(bounds))


@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ([4, 2, 2, 2], [-1, 0, 0, 0]),
        ([3, 6, 2, 2, 5], [-1, -1, 0, 1, 1]),
        ([1, 3, 3, 1, 1, 1, 2, 2], [-1, -1, -1, 0, 2, 1, 2, 1]),
        ([MAX_SHORT_KEYS, 5, 5, 9], [-1, 0, 0, 0]),
        ([6, 3, 4, 5, 2, 7, 1, 1], [-1, 0, 0, 1, 1, 2, 5, 5]),
        ([4, 0, 5, 3, 6], [-1, 0, 1, 2, 1]),
        ([90, 30, 9, 30, 40, 12], [-1, 0, 1, 1, 0, 4]),
        ([MAX_PADDED_KEYS, 20, 20, 21, 9, 9], [-1, 0, 0, 1, 3, 3]),
    ],
)
def test_a_segment_sees_those_that_it_continues_and_itself(lengths, parents):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layout = PackedLayout(tuple(bounds), CPU, tuple(parents))
    assert_same_with_gradients(layout.attend, segment_mask(bounds, parents))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_keys_that_many_segments_continue_are_not_kept_for_each_of_them(monkeypatch, has_kernels):
    """What a pass keeps grows with the tokens of its row, and not with the segments that read a long beginning."""
    if not has_kernels:
        monkeypatch.setattr(attention, "find_kernels", lambda _: None)
    num = 24
    layout = PackedLayout((0, *range(600, 600 + 5 * num + 1, 5)), CPU, (-1, *[0] * num))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        layout.attend(0, *random_qkv(600 + 5 * num))
    kinds = [x for x in kept.values() if x.is_floating_point() and x.dim() >= 3]
    assert sum(x.numel() for x in kinds) < 3 * (2 * KV_HEADS + 2 * HEADS) * DIM * (600 + 5 * num)
    assert_same_with_gradients(layout.attend, segment_mask(layout.cu_seqlens, layout.parents))


def test_positions_begin_anew_in_a_document_and_go_on_in_a_continuation():
    assert PackedLayout((0, 3, 5), CPU).position_ids.tolist() == [0, 1, 2, 0, 1]
    layout = PackedLayout((0, 3, 5, 7, 8), CPU, (-1, -1, 0, 1))
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 1, 3, 4, 2]


def layout_of(lengths, prompts=(), num_shared=0):
    """Documents, then num_shared continuations of different lengths per prompt."""
    lengths = [*lengths, *prompts]
    parents = [-1] * len(lengths)
    generator = np.random.default_rng(0)
    for prompt in range(len(lengths) - len(prompts), len(lengths)):
        for _ in range(num_shared):
            lengths.append(int(generator.integers(1, 30)))
            parents.append(prompt)
    return PackedLayout((0, *np.cumsum(lengths).tolist()), CPU, tuple(parents))


@pytest.mark.parametrize("num_documents", [1, 40])
@pytest.mark.parametrize("longest", [20, MAX_SHORT_KEYS + 20, MAX_PADDED_KEYS + 30])
def test_documents_of_many_lengths_share_calls_and_never_see_each_other(num_documents, longest):
    lengths = [*np.random.default_rng(num_documents).integers(0, 25, num_documents).tolist(), longest]
    layout = layout_of(lengths)
    assert_same_with_gradients(layout.attend, segment_mask(layout.cu_seqlens))


@pytest.mark.heavy
@pytest.mark.parametrize("longest", [9, MAX_SHORT_KEYS, 200, MAX_PADDED_KEYS])
def test_continuations_of_many_lengths_share_calls_and_see_their_own_prefix_only(longest):
    prompts = [longest, *np.random.default_rng(1).integers(1, longest, 6).tolist()]
    layout = layout_of([3, 0, 11], prompts, num_shared=3)
    assert_same_with_gradients(layout.attend, segment_mask(layout.cu_seqlens, layout.parents))


@pytest.mark.usefixtures("flash_only")
def test_calls_grow_with_the_longest_segment_and_not_with_the_number_of_lengths(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "_causal", lambda q, k, v, bias: calls.append(q.shape) or q.flatten(0, 1))
    lengths = np.random.default_rng(0).permutation(np.arange(1, 65)).tolist()
    layout = layout_of(lengths, prompts=range(20, 52), num_shared=8)
    q, k, v = random_qkv(layout.cu_seqlens[-1])
    out = layout.attend(0, q, k, v)
    assert torch.equal(out, q), "every result stands in its own row"
    assert len(calls) <= 64 // PAD_STEP + (30 // PAD_STEP + 1) * (52 // PAD_STEP)
    assert sum(shape[0] * shape[1] for shape in calls) < 1.4 * len(q)


@pytest.mark.usefixtures("flash_only")
def test_segments_of_one_length_are_neither_padded_nor_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "_causal", lambda q, k, v, bias: seen.append(q) or q.flatten(0, 1))
    q, k, v = random_qkv(28)
    packed_attention((0, 7, 14, 21, 28))(0, q, k, v)
    assert [each.shape for each in seen] == [(4, 7, HEADS, DIM)] and seen[0].data_ptr() == q.data_ptr()


@pytest.mark.usefixtures("torch_only")
def test_short_and_long_segments_of_one_row_give_the_same_by_either_way(monkeypatch):
    """Both kinds of calls pad and share; together they fill every row once."""
    layout = layout_of([3, 0, 150, 11, 150], prompts=[4, 40, 120], num_shared=4)
    probe = torch.randn(layout.cu_seqlens[-1], HEADS, DIM, generator=torch.Generator().manual_seed(1))
    results = []
    for longest in (MAX_SHORT_KEYS, 0, MAX_PADDED_KEYS):
        monkeypatch.setattr(attention, "MAX_SHORT_KEYS", longest)
        qkv = random_qkv(layout.cu_seqlens[-1])
        out = PackedLayout(layout.cu_seqlens, CPU, layout.parents).attend(0, *qkv)
        results.append([out, *torch.autograd.grad((out * probe).sum(), qkv)])
    for found in zip(*results):
        for other in found[1:]:
            torch.testing.assert_close(found[0], other, atol=2e-6, rtol=2e-5)


@pytest.mark.usefixtures("torch_only")
def test_gradients_of_short_segments_are_the_slopes_of_the_function():
    layout = layout_of([3, 5, 5], prompts=[2, 4], num_shared=2)
    call = attention._attend_in_calls(layout.tree, CPU)
    qkv = random_qkv(layout.cu_seqlens[-1])
    probe = torch.randn_like(qkv[0])
    out = call(0, *qkv)
    assert "Short" in type(out.grad_fn).__name__
    grads = torch.autograd.grad(out, qkv, probe)
    expected = masked_attention(*(x.double() for x in qkv), segment_mask(layout.cu_seqlens, layout.parents))
    for found, exact in zip(grads, torch.autograd.grad(expected, qkv, probe.double())):
        torch.testing.assert_close(found, exact.float(), atol=2e-6, rtol=2e-5)


def test_one_layout_serves_networks_of_other_numbers_of_heads():
    layout = layout_of([3, 5, 5], prompts=[2, 4], num_shared=2)
    q, k, v = random_qkv(layout.cu_seqlens[-1])
    whole = layout.attend(0, q, k, v)
    some = layout.attend(0, q[:, :2], k[:, :1], v[:, :1])
    torch.testing.assert_close(some, whole[:, :2])


def test_cu_seqlens_may_be_a_tensor():
    q, k, v = random_qkv(6)
    by_tensor = packed_attention(torch.tensor([0, 2, 6], dtype=torch.int32))(0, q, k, v)
    assert torch.equal(by_tensor, packed_attention((0, 2, 6))(0, q, k, v))
