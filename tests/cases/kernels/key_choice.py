"""Rows of segments, vectors of an index for them, and which keys they choose."""

from __future__ import annotations

import numpy as np
import torch

from stretto_families.mixers.key_choice import IndexVectors

INDEX_HEADS, INDEX_WIDTH = 4, 5
ROWS = {
    "one": ((0, 23), None),
    "packed": ((0, 1, 9, 9, 40, 43), None),
    "prefixes": ((0, 12, 20, 33, 36, 50), (-1, -1, 0, 0, 1)),
    "a tree": ((0, 12, 20, 33, 36, 50, 57, 58), (-1, -1, 0, 2, 2, 3, 1)),
}


def vectors(
    num: int, tokens: np.ndarray | None = None, seed: int = 0, heads: int = INDEX_HEADS, width: int = INDEX_WIDTH
) -> IndexVectors:
    """Small whole numbers, so that many scores are equal, and equal in any order of summation."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: torch.from_numpy(rng.integers(-2, 3, shape).astype(np.float32))
    queries, weights, keys = draw(num, heads, width), draw(num, heads), draw(num, width)
    rows = slice(None) if tokens is None else tokens
    return IndexVectors(queries[rows], weights[rows], keys)


def visible(bounds, parents) -> np.ndarray:
    """[tokens, tokens]: True where a query may see a key."""
    segments = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    index = np.arange(len(segments))
    seen = (segments[:, None] == segments) & (index <= index[:, None])
    for child, parent in enumerate(parents or ()):
        while parent >= 0:
            seen |= (segments[:, None] == child) & (segments == parent)
            parent = parents[parent]
    return seen


def chosen_densely(parts: IndexVectors, seen: np.ndarray, top_k: int) -> np.ndarray:
    """[queries, tokens]: True for the keys with the highest scores; of equal ones, the earliest."""
    scores = torch.einsum("qh,qhk->qk", parts.weights, (parts.queries @ parts.keys.T).relu()).numpy()
    chosen = np.zeros_like(seen)
    for row, (score, mask) in enumerate(zip(scores, seen)):
        keys = np.flatnonzero(mask)
        chosen[row, keys[np.argsort(-score[keys], kind="stable")[:top_k]]] = True
    return chosen
