"""Attention to chosen keys by kernels in C against a mask over the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.kernels.key_choice import ROWS, chosen_densely, vectors, visible

from stretto.models.segments import SegmentTree
from stretto_families.mixers import key_choice
from stretto_families.mixers.key_choice import (
    NOT_A_KEY,
    IndexVectors,
    KeyChoice,
    VisibleKeys,
    attend_chosen,
    choose_keys,
)
from stretto_native import chosen as chosen_kernels
from stretto_native import library
from stretto_native.chosen import find_attention_kernels, find_index_kernels

LONG_ROWS = ROWS | {
    "long documents": ((0, 70, 71, 260), None),
    "a long tree": ((0, 37, 101, 150, 160, 240, 263), (-1, 0, 1, 2, -1, 1)),
}
SHAPES = [(3, 48, 32, 4, 16), (4, 32, 32, 3, 48), (9, 80, 64, 7, 32), (1, 144, 128, 1, 128)]
"""Heads, widths of keys and values, heads and width of the index: those that the kernels in C support."""


@pytest.fixture
def kernels():
    if library.find_library() is None:
        pytest.skip("needs a C compiler")
    return chosen_kernels._kernels()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("top_k", [1, 6, 100])
@pytest.mark.parametrize("row", LONG_ROWS)
def test_kernels_choose_the_same_keys_by_scores_of_any_kind(row, top_k, kernels, threads):
    bounds, parents = LONG_ROWS[row]
    num = bounds[-1]
    pieces = np.array_split(np.arange(num), 4)
    for i, tokens in enumerate((np.arange(num), np.concatenate((pieces[1], pieces[2])), pieces[3])):
        heads, width = SHAPES[i][3:]
        threads(1 + i % 2)
        for dtype in (torch.float32, torch.bfloat16):
            queries, weights, keys = vectors(num, tokens, i, heads, width)
            weights = weights * (torch.tensor(0.0) if i == 2 else torch.tensor(-0.5))  # scores of +0 and -0 are equal
            parts = IndexVectors(queries.to(dtype), weights, keys.to(dtype))
            visible_keys = VisibleKeys.of(SegmentTree.of(bounds, parents), torch.device("cpu"), tokens)
            assert find_index_kernels(*parts) is kernels
            got = choose_keys(parts, visible_keys, top_k)
            want = chosen_densely(parts._replace(queries=queries, keys=keys), visible(bounds, parents)[tokens], top_k)
            assert got.shape == (len(tokens), want.sum(1).max())
            for chosen, expected in zip(got.numpy(), want):
                assert chosen[len(chosen) - expected.sum() :].tolist() == np.flatnonzero(expected).tolist()
                assert (chosen[: len(chosen) - expected.sum()] == NOT_A_KEY).all()


def draw_inputs(num, shape, seed=1):
    """q, k, slopes of the result, and real vectors of an index, float32."""
    heads, width, value, index_heads, index_width = shape
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator)
    weights = draw(num, index_heads) * (index_heads * index_width) ** -0.5
    parts = IndexVectors(draw(num, index_heads, index_width), weights, draw(num, index_width))
    return draw(num, heads, width), draw(num, width), draw(num, heads, value), parts


def run_kernels(row, shape, dtype=torch.float32, loss_scale=0.7, top_k=6):
    """Chosen keys, the result, the loss, and the gradients of q, k and the index's vectors."""
    bounds, parents = LONG_ROWS[row]
    q, k, slopes, parts = draw_inputs(bounds[-1], shape)
    parts = IndexVectors(parts[0].to(dtype), parts[1], parts[2].to(dtype))
    inputs = [x.detach().requires_grad_() for x in (q.to(dtype), k.to(dtype), *parts)]
    choice = KeyChoice(0, top_k, shape[1] ** -0.5, {}, IndexVectors(*inputs[2:]), loss_scale, {})
    keys, seen = inputs[1].unsqueeze(1), VisibleKeys.of(SegmentTree.of(bounds, parents), torch.device("cpu"))
    out = attend_chosen(choice, inputs[0], keys, keys[..., : shape[2]], seen)
    grads = torch.autograd.grad((out * slopes.to(dtype)).sum(), inputs, allow_unused=True)
    return choice.chosen[0], out, choice.losses.get(0), grads


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", LONG_ROWS)
def test_kernels_attend_and_teach_an_index_as_a_masked_softmax(row, shape):
    bounds, parents = LONG_ROWS[row]
    chosen, out, loss, grads = run_kernels(row, shape)
    q, k, slopes, parts = draw_inputs(bounds[-1], shape)
    hidden = ~torch.from_numpy(chosen_densely(parts, visible(bounds, parents), 6))
    assert [c[c != NOT_A_KEY].tolist() for c in chosen.numpy()] == [np.flatnonzero(~h).tolist() for h in hidden.numpy()]
    inputs = [x.double().requires_grad_() for x in (q, k, *parts)]
    q, k, queries, weights, keys = inputs
    scores = (torch.einsum("qhd,kd->qhk", q, k) * shape[1] ** -0.5).masked_fill(hidden.unsqueeze(1), float("-inf"))
    shares = scores.softmax(-1)
    expected = torch.einsum("qhk,kd->qhd", shares, k[:, : shape[2]])
    attention = shares.mean(1).detach()
    index = torch.einsum("qh,qhk->qk", weights, (queries @ keys.T).relu()).masked_fill(hidden, float("-inf"))
    divergence = torch.xlogy(attention, attention) - (attention * index.log_softmax(-1)).masked_fill(hidden, 0.0)
    expected_loss = divergence.sum()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loss.double(), expected_loss.detach(), atol=1e-6, rtol=1e-6)
    exact_grads = torch.autograd.grad((expected * slopes).sum() + 0.7 * expected_loss, inputs)
    for ours, exact in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=5e-6, rtol=1e-6)
        assert (ours - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", LONG_ROWS)
def test_kernels_round_bfloat16_where_torch_rounds_it(row, shape, kernels, monkeypatch):
    fast = run_kernels(row, shape, torch.bfloat16)
    monkeypatch.setattr(key_choice, "find_kernels", lambda _: None)
    slow = run_kernels(row, shape, torch.bfloat16)
    assert fast[1].dtype is torch.bfloat16 and [g.dtype for g in fast[3]] == [g.dtype for g in slow[3]]
    is_same = (fast[0] == slow[0]).all(1)  # scores of real numbers may be equal but for their last bits
    assert is_same.float().mean() > 0.98
    assert (fast[1] == slow[1])[is_same].float().mean() > 0.95
    torch.testing.assert_close(fast[1][is_same], slow[1][is_same], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(fast[2], slow[2], atol=1e-2, rtol=1e-4)
    for ours, theirs in zip(fast[3], slow[3], strict=True):
        assert (ours.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [6, 40])
def test_two_threads_give_chosen_keys_the_same_bits(dtype, top_k, threads):
    results = []
    for number in (1, 2):
        threads(number)
        chosen, out, loss, grads = run_kernels("a long tree", SHAPES[2], dtype, top_k=top_k)
        results.append((chosen, out, loss, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("kernels")
def test_a_shared_beginning_is_chosen_from_and_attended_to_with_the_same_bits():
    q, k, _, parts = draw_inputs(100, SHAPES[0])

    def run(bounds, parents, rows):
        choice = KeyChoice(0, 9, 0.3, {}, IndexVectors(*(part[rows] for part in parts)))
        seen, keys = VisibleKeys.of(SegmentTree.of(bounds, parents), torch.device("cpu")), k[rows].unsqueeze(1)
        return attend_chosen(choice, q[rows], keys, keys[..., :32], seen), choice.chosen[0]

    whole, numbers = run((0, 60), None, torch.arange(60))
    rows = torch.cat((torch.arange(60, 67), torch.arange(20), torch.arange(67, 100), torch.arange(20, 60)))
    parted, their_numbers = run((0, 7, 27, 60, 100), (-1, -1, 1, 1), rows)
    mine = torch.cat((torch.arange(7, 27), torch.arange(60, 100)))
    assert torch.equal(parted[mine], whole)
    moved = torch.where(their_numbers[mine] < 0, -1, rows[their_numbers[mine].clamp_min(0).long()])
    assert torch.equal(moved, numbers.long())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_without_queries_has_gradients_of_zero(dtype):
    q, k, _, parts = draw_inputs(3, SHAPES[0])
    none = slice(0, 0)
    rows = (q[none], k, parts.queries[none], parts.weights[none], parts.keys)
    inputs = [x.to(dtype).requires_grad_() for x in rows]
    choice = KeyChoice(0, 6, 0.3, {}, IndexVectors(*inputs[2:]), 0.7, {})
    seen = VisibleKeys.of(SegmentTree.of((0, 3)), torch.device("cpu"), np.arange(0))
    keys = inputs[1].unsqueeze(1)
    out = attend_chosen(choice, inputs[0], keys, keys[..., :32], seen)
    grads = torch.autograd.grad(out, inputs, torch.zeros_like(out))
    assert choice.losses[0] == 0 and out.shape == (0, 3, 32)
    assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, inputs, strict=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e3, 1e6, 1e20])
def test_gradients_of_large_scores_are_as_those_of_small_ones(factor, dtype, monkeypatch):
    """The backward pass has the weights of the forward pass, not nearly."""
    draw = lambda *sizes: torch.randn(*sizes, generator=torch.Generator().manual_seed(3)).to(dtype)
    q, k, slopes = draw(120, 3, 48) * factor, draw(120, 48), draw(120, 3, 32)
    seen = VisibleKeys.of(SegmentTree.of((0, 1, 40, 120)), torch.device("cpu"))

    def run():
        inputs = [x.detach().requires_grad_() for x in (q, k)]
        choice = KeyChoice(0, 50, 0.3, {}, draw_inputs(120, SHAPES[0])[3])
        keys = inputs[1].unsqueeze(1)
        return torch.autograd.grad(attend_chosen(choice, inputs[0], keys, keys[..., :32], seen), inputs, slopes)

    fast = run()
    monkeypatch.setattr(key_choice, "find_kernels", lambda _: None)
    for ours, theirs in zip(fast, run(), strict=True):
        assert (ours.double() - theirs.double()).norm() <= 5e-3 * theirs.double().norm()
    assert not fast[0][0].any(), "a query with one key has a weight of 1 exactly"


@pytest.mark.usefixtures("kernels")
def test_a_number_that_is_none_stays_with_the_queries_that_chose_it():
    q, k, _, parts = draw_inputs(40, SHAPES[0])
    k[3] = torch.nan
    choice = KeyChoice(0, 40, 0.3, {}, parts)
    seen = VisibleKeys.of(SegmentTree.of((0, 20, 40)), torch.device("cpu"))
    out = attend_chosen(choice, q, k.unsqueeze(1), k.unsqueeze(1)[..., :32], seen)
    assert out[:3].isfinite().all() and out[3:20].isnan().all() and out[20:].isfinite().all()


def test_what_the_kernels_of_chosen_keys_cannot_take_is_left_to_torch(monkeypatch):
    x = torch.randn(4, 16)
    if library.find_library() is not None:
        assert chosen_kernels._find(x, torch.nn.Parameter(x), x.bfloat16(), widths=(16, 32)) is not None
        wide = torch.zeros(2, 64, 576), torch.zeros(2, 576)
        assert find_attention_kernels(*wide, 512) is not None
        assert find_attention_kernels(*(part.bfloat16() for part in wide), 512) is None
    for other in (x.double(), x.half(), x.to("meta")):
        assert chosen_kernels._find(x, other, widths=(16,)) is None
    assert chosen_kernels._find(x, widths=(16, 8)) is None
    monkeypatch.setattr(chosen_kernels, "find_library", lambda: None)
    chosen_kernels._kernels.cache_clear()
    assert chosen_kernels._find(x, widths=(16,)) is None
    chosen_kernels._kernels.cache_clear()
