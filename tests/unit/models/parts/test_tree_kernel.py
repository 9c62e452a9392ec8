"""The mask of a GPU's kernel over trees: its blocks are those of the dense mask, and its results those of the calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.models.attention import PackedLayout
from stretto.models.parts.attend import Limits
from stretto.models.parts.tree_kernel import BLOCK, attend_tree, build_mask, count_seen
from stretto.models.segments import SegmentTree

CPU = torch.device("cpu")
TREES = {
    "documents": ([300, 1, 130, 0, 200], [-1] * 5),
    "prompts": ([260, 40, 70, 128, 5], [-1, 0, 0, -1, 3]),
    "branches": ([140, 0, 200, 90, 33, 150, 256, 20], [-1, 0, 1, 2, 2, 0, -1, 6]),
    "one token": ([1], [-1]),
}


def dense_mask(tree: SegmentTree, window: int | None) -> np.ndarray:
    seen = np.zeros((int(tree.bounds[-1]),) * 2, bool)
    place = np.zeros(len(seen), np.int64)
    for segment in range(len(tree.parents)):
        for token in range(tree.bounds[segment], tree.bounds[segment + 1]):
            seen[token, tree.prefix_rows(segment)] = True
            seen[token, tree.bounds[segment] : token + 1] = True
            place[token] = seen[token].sum() - 1
    return seen if window is None else seen & (place[:, None] - place < window)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", TREES)
def test_blocks_are_skipped_whole_or_masked_as_the_dense_mask_says(name, window):
    lengths, parents = TREES[name]
    tree = SegmentTree.of([0, *np.cumsum(lengths).tolist()], parents)
    seen = dense_mask(tree, window)
    num = len(count_seen(tree))
    padded = np.zeros((num * BLOCK,) * 2, bool)
    padded[: len(seen), : len(seen)] = seen
    pairs = padded.reshape(num, BLOCK, num, BLOCK).sum((1, 3))
    if window is None:
        assert (count_seen(tree) == pairs).all()
    mask = build_mask(tree, window, CPU)
    computed = mask.to_dense()[0, 0].numpy().astype(bool)
    assert computed[pairs > 0].all(), "no block that a token sees is skipped"
    assert window is not None or not computed[pairs == 0].any()
    tokens = torch.arange(len(seen))
    by_token = mask.mask_mod(torch.tensor(0), torch.tensor(0), tokens[:, None], tokens[None])
    assert (by_token.numpy() == seen).all()


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", TREES)
def test_results_are_those_of_the_calls_on_a_cpu(name, window):
    """torch has no gradients of it on a CPU: tests/gpu/test_trees_gpu.py compares those."""
    lengths, parents = TREES[name]
    bounds = (0, *np.cumsum(lengths).tolist())
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(bounds[-1], heads, 16, generator=generator) for heads in (4, 2, 2)]
    layout = PackedLayout(bounds, CPU, tuple(parents))
    out = attend_tree(*inputs, build_mask(layout.tree, window, CPU))
    torch.testing.assert_close(out, layout.attend(0, *inputs, Limits(window, None)), atol=2e-6, rtol=2e-5)
