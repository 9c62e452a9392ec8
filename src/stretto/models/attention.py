"""Causal attention within packed documents: what the trainer hands the decoder as `Attend`.

Documents never see each other and are never padded. Neighbouring documents of equal shape go through one
batched call, so rows.py sorts them: a few calls a layer then do instead of one a document. A segment may
continue another one, its prefix: the samples of a group share their prompt, which is then computed once and
attended to by all. The slow reference, one mask over the whole row, stands in the tests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim].

q and k carry their positions already; scores are scaled by head_dim ** -0.5 and causal within a sequence."""

SHORT_KEYS = 64
"""Up to so many keys two batched products beat the CPU's flash kernel (1.6 times at 20 keys, even at 64)."""


@dataclass(frozen=True)
class PackedLayout:
    """Where segments begin and end in a row: segment s is tokens cu_seqlens[s]:cu_seqlens[s + 1].

    A segment is a document, unless `parents` is given: then segment s continues segment parents[s] (-1: it
    begins a document). Segments without parent come first, and a parent has none itself.
    """

    cu_seqlens: tuple[int, ...]
    device: torch.device
    parents: tuple[int, ...] | None = None

    @cached_property
    def position_ids(self) -> Int[Tensor, " tokens"]:
        """Position of every token in its document."""
        bounds = np.asarray(self.cu_seqlens)
        lengths = np.diff(bounds)
        offsets = -bounds[:-1]
        if self.parents is not None:
            parents = np.asarray(self.parents)
            offsets = offsets + np.where(parents >= 0, lengths[parents], 0)
        positions = np.arange(bounds[-1]) + np.repeat(offsets, lengths)
        return torch.from_numpy(positions).to(self.device)

    @cached_property
    def attend(self) -> Attend:
        if self.parents is None or all(parent < 0 for parent in self.parents):
            return packed_attention(self.cu_seqlens)
        return prefix_attention(self.cu_seqlens, self.parents, self.device)


def packed_attention(cu_seqlens: tuple[int, ...] | Tensor) -> Attend:
    """An `Attend` over documents with these bounds (0, end of the first, ..., number of tokens)."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(b) for b in cu_seqlens]
    runs = equal_length_runs(bounds)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if _fits_varlen(q):
            return _varlen(q, k, v, bounds)
        parts = [_causal(*(_split(x[a:b], num) for x in (q, k, v))) for a, b, num in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attend


def prefix_attention(cu_seqlens: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> Attend:
    """An `Attend` where segments with a parent also see all of it (PackedLayout)."""
    num_roots = sum(parent < 0 for parent in parents)
    assert all(0 <= p < num_roots for p in parents[num_roots:]), (
        "a parent must be a root, and roots come first"
    )
    roots = packed_attention(cu_seqlens[: num_roots + 1])
    end = cu_seqlens[num_roots]
    runs = _continued_runs(cu_seqlens, parents, num_roots, device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [roots(layer, q[:end], k[:end], v[:end])]
        for a, b, num, prefix in runs:
            seen = [
                torch.cat((_split(x.index_select(0, prefix), num), _split(x[a:b], num)), dim=1)
                for x in (k, v)
            ]
            parts.append(_causal(_split(q[a:b], num), *seen))
        return torch.cat(parts)

    return attend


def equal_length_runs(bounds: list[int]) -> list[tuple[int, int, int]]:
    """(first token, last token + 1, number of documents) of each stretch of equally long documents."""
    runs: list[tuple[int, int, int]] = []
    length_before = None
    for start, end in pairwise(bounds):
        if end == start:
            continue
        if end - start == length_before:
            runs[-1] = (runs[-1][0], end, runs[-1][2] + 1)
        else:
            runs.append((start, end, 1))
        length_before = end - start
    return runs


def _continued_runs(
    bounds: tuple[int, ...], parents: tuple[int, ...], first: int, device: torch.device
) -> list[tuple[int, int, int, Tensor]]:
    """(first token, last token + 1, segments, rows of their prefixes) of neighbours of one shape."""
    runs: list[list] = []
    shape_before = None
    for segment in range(first, len(parents)):
        start, end = bounds[segment], bounds[segment + 1]
        prefix = range(bounds[parents[segment]], bounds[parents[segment] + 1])
        if end == start:
            continue
        if (end - start, len(prefix)) == shape_before:
            runs[-1][1:3] = end, runs[-1][2] + 1
            runs[-1][3].extend(prefix)
        else:
            runs.append([start, end, 1, list(prefix)])
        shape_before = end - start, len(prefix)
    return [(a, b, num, torch.tensor(rows, device=device)) for a, b, num, rows in runs]


def _split(x: Tensor, num_segments: int) -> Tensor:
    return x.unflatten(0, (num_segments, -1))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [segments, queries, heads, dim] against k, v [segments, keys, kv heads, dim], aligned at the end."""
    queries, keys = q.shape[1], k.shape[1]
    if keys <= SHORT_KEYS and q.dtype is torch.float32 and not q.is_cuda:
        return _short(q, k, v)
    mask = (
        None
        if queries == keys
        else torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


def _short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same as plain products, one for every kv head; its query heads are stacked as rows."""
    segments, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    per_kv = heads // kv_heads
    bias = _causal_bias(queries, keys).repeat(per_kv, 1)
    q = (q * dim**-0.5).view(segments, queries, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4)
    scores = torch.baddbmm(
        bias,
        q.reshape(segments * kv_heads, per_kv * queries, dim),
        k.permute(0, 2, 3, 1).reshape(segments * kv_heads, dim, keys),
    )
    out = torch.bmm(scores.softmax(dim=-1), v.transpose(1, 2).reshape(segments * kv_heads, keys, dim))
    out = out.view(segments, kv_heads, per_kv, queries, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(segments * queries, heads, dim)


@functools.lru_cache(maxsize=1024)
def _causal_bias(queries: int, keys: int) -> Tensor:
    """0 where a query sees a key, -inf elsewhere."""
    return torch.full((queries, keys), float("-inf")).triu(keys - queries + 1)


@functools.cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention over ragged rows, where this torch has it in the form used here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def _fits_varlen(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _varlen_kernel() is not None


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
    """Flash attention over all documents in one kernel; keys and values repeated for their query heads."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=q.device)
    longest = max(b - a for a, b in pairwise(bounds))
    kernel = _varlen_kernel()
    assert kernel is not None
    return kernel(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
