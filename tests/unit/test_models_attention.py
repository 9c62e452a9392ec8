"""Packed attention equals one masked attention over the whole row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.models.attention import SHORT_KEYS, PackedLayout, equal_length_runs, packed_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


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
        if parent >= 0:
            mask |= (segment[:, None] == child) & (segment[None] == parent)
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
    [[7], [3, 3, 3], [1, 5, 5, 2, 2, 5], [0, 4, 0, 4], [SHORT_KEYS + 6, SHORT_KEYS + 6, 9], [1, 1, 1]],
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
        ([SHORT_KEYS, 5, 5, 9], [-1, 0, 0, 0]),
    ],
)
def test_a_segment_sees_its_prefix_and_itself(lengths, parents):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layout = PackedLayout(tuple(bounds), CPU, tuple(parents))
    assert_same_with_gradients(layout.attend, segment_mask(bounds, parents))


def test_positions_begin_anew_in_a_document_and_go_on_in_a_continuation():
    assert PackedLayout((0, 3, 5), CPU).position_ids.tolist() == [0, 1, 2, 0, 1]
    layout = PackedLayout((0, 3, 5, 7, 8), CPU, (-1, -1, 0, 1))
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 1, 3, 4, 2]


def test_neighbours_of_equal_length_are_one_run():
    assert equal_length_runs([0, 2, 4, 4, 6, 9]) == [(0, 6, 3), (6, 9, 1)]


def test_cu_seqlens_may_be_a_tensor():
    q, k, v = random_qkv(6)
    by_tensor = packed_attention(torch.tensor([0, 2, 6], dtype=torch.int32))(0, q, k, v)
    assert torch.equal(by_tensor, packed_attention((0, 2, 6))(0, q, k, v))
