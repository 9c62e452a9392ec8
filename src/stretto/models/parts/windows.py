"""Sliding windows: segments are cut into calls that read only keys that queries see.

A query sees itself and the window - 1 tokens before it in its document. Its segment is cut into pieces of about a
window, and each piece reads its keys and those of a window before them, also those of the segments that it
continues. So time and memory grow with the length, not with its square.
"""

from __future__ import annotations

import numpy as np
import torch

from stretto.models.parts.short_attention import AttentionCall
from stretto.models.segments import SegmentTree

_MIN_PIECE = 32
"""Fewer queries per piece would make too many calls for small windows."""


def cut_segments(tree: SegmentTree, window: int, pad_step: int, device: torch.device | None) -> list[AttentionCall]:
    """The calls over all segments, with masks of the window.

    pad_step: pieces are padded to a multiple of this many queries and keys, so that more of them share a call.
    """
    size = max(window, _MIN_PIECE)
    groups: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for segment in np.flatnonzero(tree.lengths).tolist():
        own = np.arange(tree.bounds[segment], tree.bounds[segment + 1])
        rows = np.concatenate((tree.prefix_rows(segment), own))
        for start in range(len(rows) - len(own), len(rows), size):
            queries = np.arange(start, min(start + size, len(rows)))
            keys = np.arange(max(start - window + 1, 0), queries[-1] + 1)
            distance = queries[:, None] - keys
            is_seen = (distance >= 0) & (distance < window)
            num_queries, num_keys = (-(-len(x) // pad_step) * pad_step for x in (queries, keys))
            groups.setdefault((num_queries, num_keys), []).append((rows[queries], rows[keys], is_seen))
    return [_build_call(shape, pieces, device) for shape, pieces in groups.items()]


def _build_call(
    shape: tuple[int, int], pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]], device: torch.device | None
) -> AttentionCall:
    """One call for pieces (rows of queries, rows of keys, mask) of about the same shape.

    Padding repeats the first row; queries that are padding see the first key, so that their softmax is finite.
    """
    num, (num_queries, num_keys) = len(pieces), shape
    queries, keys = np.empty((num, num_queries), np.int64), np.empty((num, num_keys), np.int64)
    is_padding = np.ones((num, num_queries), bool)
    bias = np.full((num, num_queries, num_keys), -np.inf, np.float32)
    bias[:, :, 0] = 0
    for i, (query_rows, key_rows, is_seen) in enumerate(pieces):
        count = len(query_rows)
        queries[i], keys[i] = query_rows[0], key_rows[0]
        queries[i, :count], keys[i, : len(key_rows)] = query_rows, key_rows
        is_padding[i, :count] = False
        bias[i, :count, : len(key_rows)] = np.where(is_seen, np.float32(0), np.float32(-np.inf))
    to = lambda x: torch.from_numpy(x).to(device)
    return AttentionCall(
        queries=to(queries),
        keys=to(keys),
        is_padding=to(is_padding) if is_padding.any() else None,
        bias=to(bias),
        contiguous_rows=None,
    )
