"""Trees of segments of any depth: what each token sees, and attention over it with windows and sinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.models.attention import PackedLayout
from stretto.models.parts.attend import Limits
from stretto.models.segments import SegmentTree

HEADS, KV_HEADS, DIM = 4, 2, 16
CPU = torch.device("cpu")


def random_tree(seed: int, num: int = 24, longest: int = 30) -> SegmentTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(-1, segment)) if segment else -1 for segment in range(num)]
    return SegmentTree.of([0, *np.cumsum(rng.integers(0, longest, num)).tolist()], parents)


def seen_by_walking(tree: SegmentTree) -> tuple[np.ndarray, np.ndarray]:
    """[tokens, tokens]: what each token sees; [tokens]: how many tokens it sees before itself."""
    segment = np.repeat(np.arange(len(tree.parents)), tree.lengths)
    seen = np.zeros((len(segment), len(segment)), bool)
    for token, own in enumerate(segment.tolist()):
        seen[token, tree.bounds[own] : token + 1] = True
        while (own := int(tree.parents[own])) >= 0:
            seen[token, tree.bounds[own] : tree.bounds[own + 1]] = True
    return seen, seen.sum(1) - 1


@pytest.mark.parametrize("seed", range(4))
def test_positions_runs_and_intervals_are_those_of_a_walk_to_the_root(seed):
    tree = random_tree(seed)
    seen, positions = seen_by_walking(tree)
    layout = PackedLayout(tuple(tree.bounds.tolist()), CPU, tuple(tree.parents.tolist()))
    assert (layout.position_ids.numpy() == positions).all() and tree.longest == positions.max() + 1
    segment = np.repeat(np.arange(len(tree.parents)), tree.lengths)
    for token in range(0, len(segment), 7):
        own = segment[token]
        before = np.flatnonzero(seen[token])
        assert np.concatenate((tree.prefix_rows(own), np.arange(tree.bounds[own], token + 1))).tolist() == (
            before.tolist()
        ), "tokens stand in the order of their positions"
    first, last = tree.intervals
    is_above = (first[segment] <= first[segment][:, None]) & (first[segment][:, None] < last[segment])
    assert ((is_above & (positions <= positions[:, None])) == seen).all()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("seed", range(2))
def test_windows_and_sinks_over_a_tree(seed, window, has_sinks):
    tree = random_tree(seed, num=12)
    seen, positions = seen_by_walking(tree)
    if window is not None:
        seen &= positions[:, None] - positions < window
    mask, generator = torch.from_numpy(seen), torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).requires_grad_()
    inputs = [draw(len(mask), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs += [draw(HEADS)] if has_sinks else []
    probe = draw(len(mask), HEADS, DIM).detach()

    def slow(q, k, v, sinks=None):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5).masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(mask), 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(mask)], v)

    def fast(q, k, v, sinks=None):
        layout = PackedLayout(tuple(tree.bounds.tolist()), CPU, tuple(tree.parents.tolist()))
        return layout.attend(0, q, k, v, Limits(window=window, sinks=sinks))

    results = []
    for attend in (fast, slow):
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad((out * probe).sum(), inputs)])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, atol=5e-6, rtol=2e-5)
