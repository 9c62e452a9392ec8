"""Attention to chosen keys in blocks against a mask over the whole row."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from cases.families import VOCAB, build_theirs
from cases.kernels.key_choice import ROWS, chosen_densely, vectors, visible
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.moe import Routing
from stretto.models.segments import SegmentTree
from stretto_families.mixers import key_choice
from stretto_families.mixers.documents import documents_of
from stretto_families.mixers.key_choice import (
    NOT_A_KEY,
    IndexVectors,
    KeyChoice,
    VisibleKeys,
    attend_chosen,
    choose_keys,
)

HEADS, WIDTH, VALUE = 3, 10, 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that fit none of the sizes of these tests."""
    for name, size in (("MAX_QUERIES", 4), ("MAX_KEYS", 5), ("MAX_GATHERED", 200)):
        monkeypatch.setattr(key_choice, name, size)


@pytest.mark.parametrize("table_of", [documents_of, lambda tree, device: key_choice._visible(tree, device, None)])
def test_what_layers_share_of_a_row_is_made_once_and_kept_no_longer_than_the_row(table_of):
    layout, device = PackedLayout((0, 3, 5), torch.device("cpu")), torch.device("cpu")
    made = table_of(layout.tree, device)
    assert table_of(layout.tree, device) is made
    kept = weakref.ref(made)
    del made, layout
    assert kept() is None


@pytest.mark.parametrize("top_k", [1, 6, 100])
@pytest.mark.parametrize("row", ROWS)
def test_the_best_keys_are_chosen_and_of_equal_ones_the_earliest(row, top_k):
    bounds, parents = ROWS[row]
    num = bounds[-1]
    pieces = np.array_split(np.arange(num), 4)
    for tokens in (np.arange(num), np.concatenate((pieces[1], pieces[2])), np.concatenate((pieces[0], pieces[3]))):
        parts = vectors(num, tokens)
        visible_keys = VisibleKeys.of(SegmentTree.of(bounds, parents), torch.device("cpu"), tokens)
        got = choose_keys(parts, visible_keys, top_k).numpy()
        want = chosen_densely(parts, visible(bounds, parents)[tokens], top_k)
        assert got.shape == (len(tokens), want.sum(1).max())
        for chosen, expected in zip(got, want):
            assert chosen[chosen != NOT_A_KEY].tolist() == np.flatnonzero(expected).tolist()


@pytest.mark.parametrize("row", ROWS)
def test_attention_and_gradients_equal_a_masked_softmax(row):
    bounds, parents = ROWS[row]
    num, generator = bounds[-1], torch.Generator().manual_seed(1)
    q, k = (torch.randn(num, *shape, generator=generator, dtype=torch.float64) for shape in ((HEADS, WIDTH), (WIDTH,)))
    slopes = torch.randn(num, HEADS, VALUE, generator=generator, dtype=torch.float64)
    q, k = q.requires_grad_(), k.requires_grad_()
    choice = KeyChoice(0, 6, 0.3, {}, vectors(num))
    visible_keys = VisibleKeys.of(SegmentTree.of(bounds, parents), torch.device("cpu"))
    out = attend_chosen(choice, q, k.unsqueeze(1), k.unsqueeze(1)[..., :VALUE], visible_keys)
    got = torch.autograd.grad((out * slopes).sum(), (q, k))
    mask = torch.from_numpy(chosen_densely(choice.vectors, visible(bounds, parents), 6))
    scores = (torch.einsum("qhd,kd->qhk", q, k) * 0.3).masked_fill(~mask.unsqueeze(1), float("-inf"))
    expected = torch.einsum("qhk,kd->qhd", scores.float().softmax(-1).double(), k[:, :VALUE])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(got, torch.autograd.grad((expected * slopes).sum(), (q, k))):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("row", ROWS)
def test_the_loss_of_an_index_is_its_divergence_from_the_attention(row):
    bounds, parents = ROWS[row]
    num, generator = bounds[-1], torch.Generator().manual_seed(2)
    q, k = (torch.randn(num, *shape, generator=generator) for shape in ((HEADS, WIDTH), (WIDTH,)))
    slopes = torch.randn(num, HEADS, VALUE, generator=generator)
    parts = IndexVectors(*(torch.randn(part.shape, generator=generator).requires_grad_() for part in vectors(num)))
    visible_keys = VisibleKeys.of(SegmentTree.of(bounds, parents), torch.device("cpu"))

    def run(scale: float | None) -> tuple[torch.Tensor, ...]:
        inputs = (q.clone().requires_grad_(), k.clone().requires_grad_())
        choice = KeyChoice(0, 6, 0.3, {}, parts, scale, losses)
        keys = inputs[1].unsqueeze(1)
        out = attend_chosen(choice, inputs[0], keys, keys[..., :VALUE], visible_keys)
        return torch.autograd.grad((out * slopes).sum(), (*inputs, *parts), allow_unused=True)

    losses: dict[int, torch.Tensor] = {}
    with_loss, without = run(0.7), run(None)
    assert torch.equal(with_loss[0], without[0]) and torch.equal(with_loss[1], without[1])
    assert without[2:] == (None, None, None)
    scores = torch.einsum("qh,qhk->qk", parts.weights, (parts.queries @ parts.keys.T).relu())
    detached = IndexVectors(*(part.detach() for part in parts))
    hidden = torch.from_numpy(~chosen_densely(detached, visible(bounds, parents), 6))
    attention = (torch.einsum("qhd,kd->qhk", q, k) * 0.3).masked_fill(hidden.unsqueeze(1), float("-inf"))
    attention = attention.softmax(-1).mean(1)
    index = scores.masked_fill(hidden, float("-inf")).log_softmax(-1)
    expected = (attention * (attention.log() - index)).masked_fill(hidden, 0.0).sum()
    torch.testing.assert_close(losses[0], expected.detach(), atol=1e-4, rtol=1e-5)
    for ours, theirs in zip(with_loss[2:], torch.autograd.grad(0.7 * expected, parts)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.heavy
def test_no_tensor_grows_with_the_square_of_the_tokens(tmp_path, monkeypatch):
    for name, size in (("MAX_QUERIES", 32), ("MAX_KEYS", 64), ("MAX_GATHERED", 1 << 14)):
        monkeypatch.setattr(key_choice, name, size)
    build_theirs("glm_moe_dsa").save_pretrained(tmp_path)
    model = hub.load_model(tmp_path, dtype=torch.float32)
    object.__setattr__(model.config, "max_position_embeddings", 1024)
    largest = []
    for num in (512, 1024):
        ids = torch.arange(num) % VOCAB
        with _LargestTensor() as seen:
            model.hidden(ids, PackedLayout((0, num), ids.device)).sum().backward()
        largest.append(seen.elements)
    assert largest[1] <= 2 * largest[0] and largest[1] < 1024 * 1024 / 4


def test_a_pass_without_gradients_keeps_the_last_choice_only(tmp_path):
    build_theirs("glm_moe_dsa-shared-choices-biases").save_pretrained(tmp_path)
    model, ids = hub.load_model(tmp_path, dtype=torch.float32), torch.arange(VOCAB)
    kept = []
    for has_gradients in (False, True):
        routing = Routing()
        with torch.set_grad_enabled(has_gradients):
            model.hidden(ids, PackedLayout((0, VOCAB), ids.device), routing=routing)
        kept.append(sorted(routing.key_choices))
    assert kept == [[2], [0, 2]]
