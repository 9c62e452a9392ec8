"""Causal attention within packed documents: what the trainer hands the decoder as `Attend`.

Documents are never padded and never see each other. Neighbouring documents of equal length go through one
batched call, so sort documents by length where the order is free (the learner does): short documents then
cost a few calls a layer instead of one each. The slow reference, one mask over the row, stands in the tests.
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


@dataclass(frozen=True)
class PackedLayout:
    """Where documents begin and end in a row: document d is tokens cu_seqlens[d]:cu_seqlens[d + 1]."""

    cu_seqlens: tuple[int, ...]
    device: torch.device

    @cached_property
    def position_ids(self) -> Int[Tensor, " tokens"]:
        """Position of every token in its own document."""
        bounds = np.asarray(self.cu_seqlens)
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        return torch.from_numpy(positions).to(self.device)


def packed_attention(cu_seqlens: tuple[int, ...] | Tensor) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """An `Attend` over documents with these bounds (0, end of the first, ..., number of tokens)."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(b) for b in cu_seqlens]
    runs = equal_length_runs(bounds)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if _fits_varlen(q):
            return _varlen(q, k, v, bounds)
        parts = [_causal(q[a:b], k[a:b], v[a:b], num) for a, b, num in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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


def _causal(q: Tensor, k: Tensor, v: Tensor, num_documents: int) -> Tensor:
    """Attention within each of `num_documents` equal slices of the row."""
    batched = [x.unflatten(0, (num_documents, -1)).transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


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
