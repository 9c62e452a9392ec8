"""Causal attention within packed documents: the `Attend` (parts/attend.py) that the trainer uses.

Documents never see each other. A segment may continue another one (segments.py): samples that begin alike share what
they begin with, which is then computed once and attended to by all. Segments of about the same shape share one
batched call (`AttentionCall`); short ones are padded by a few tokens, so that a few calls per layer are enough for any
mix of lengths. For float32 on a CPU, calls with few keys are matrix products (parts/short_attention.py). The slow
reference, one mask over the whole row, is in the tests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from stretto.models.device.kernels import find_kernels
from stretto.models.parts.attend import NO_LIMITS, Attend, Limits
from stretto.models.parts.short_attention import AttentionCall, ShortAttention
from stretto.models.parts.sinks import attend_with_sinks
from stretto.models.parts.tree_kernel import attend_tree, build_mask
from stretto.models.parts.windows import cut_segments
from stretto.models.segments import SegmentTree

if TYPE_CHECKING:
    from jaxtyping import Int

PAD_STEP = 8
"""Short segments are padded to a multiple of this many tokens, so that similar lengths share a call."""
MAX_PADDED_KEYS = 512
"""Segments with more keys share a call only if their shapes are equal: padding would cost more than it saves."""
MAX_COPIES = 4
"""Where segments read more keys than this many times the row's tokens, calls copy them again in the backward pass.
Kernels of add-ons read keys in place, and compute such rows at any length."""
MAX_SHORT_KEYS = 64
"""Up to this many keys, parts/short_attention.py beats the CPU's flash kernel; at 92 they are equal."""


@dataclass(frozen=True)
class PackedLayout:
    """Segments of a row: segment s is tokens cu_seqlens[s]:cu_seqlens[s + 1].

    Without `parents` each segment is a document; with them segment s continues segment parents[s], which stands before
    it, or starts a document if that is -1.
    """

    cu_seqlens: tuple[int, ...]
    device: torch.device
    parents: tuple[int, ...] | None = None
    image_positions: Int[Tensor, "3 tokens"] | None = None
    """Positions in a row with images (parts/image_positions.py); None: tokens are rotated by `position_ids`."""

    @property
    def has_parents(self) -> bool:
        """True if a segment continues another one."""
        return self.parents is not None and any(parent >= 0 for parent in self.parents)

    @cached_property
    def tree(self) -> SegmentTree:
        """These segments, for what needs more than their bounds."""
        return SegmentTree.of(self.cu_seqlens, self.parents)

    @property
    def rotations(self) -> Int[Tensor, "*axes tokens"]:
        """The positions by which queries and keys are rotated: of tokens, or of images too."""
        return self.position_ids if self.image_positions is None else self.image_positions

    @cached_property
    def position_ids(self) -> Int[Tensor, " tokens"]:
        """Position of every token in its document."""
        tree = self.tree
        positions = np.arange(tree.bounds[-1]) + np.repeat(tree.prefixes - tree.bounds[:-1], tree.lengths)
        return torch.from_numpy(positions).to(self.device)

    @cached_property
    def attend(self) -> Attend:
        """Attention over these segments."""
        if not self.has_parents:
            return packed_attention(self.cu_seqlens, self.device)
        return _attend_in_calls(self.tree, self.device)


def packed_attention(
    cu_seqlens: tuple[int, ...] | Int[Tensor, " bounds"], device: torch.device | None = None
) -> Attend:
    """An `Attend` over documents with these bounds (0, end of the first, ..., number of tokens)."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(b) for b in cu_seqlens]
    in_calls = _attend_in_calls(SegmentTree.of(bounds), device)
    longest = max((b - a for a, b in pairwise(bounds)), default=0)

    @functools.cache
    def ends(device: torch.device) -> Tensor:
        return torch.tensor(bounds, dtype=torch.int32, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        if limits.keys is None and limits.sinks is None and _supports_varlen(q):
            return _attend_varlen(q, k, v, ends(q.device), longest, limits.window)
        return in_calls(layer, q, k, v, limits)

    return attend


# -- calls: segments of about the same shape together --


def _attend_in_calls(tree: SegmentTree, device: torch.device | None) -> Attend:
    """An `Attend` over all segments, with one call per shape."""
    copies = int((tree.lengths + tree.prefixes).sum()) > MAX_COPIES * int(tree.bounds[-1])
    build = find_kernels("cpu.attention")
    in_place = None if build is None else build(tree, is_any_length=copies)

    @functools.cache
    def mask(window: int | None, device: torch.device) -> BlockMask:
        return build_mask(tree, window, device)

    @functools.cache
    def plan(window: int | None) -> _CallPlan:
        calls = _build_calls(tree, window, device)
        return _CallPlan(calls, int(tree.bounds[-1]), keeps_copies=not copies)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        if limits.keys is not None:
            return limits.keys.attend(q, k, v, tree)
        is_plain = limits.sinks is None and (limits.window is None or tree.longest <= limits.window)
        if is_plain and in_place is not None and (out := in_place(q, k, v)) is not None:
            return out
        if q.is_cuda and limits.sinks is None and (tree.parents >= 0).any():
            return attend_tree(q, k, v, mask(limits.window, q.device))
        return plan(limits.window).attend(q, k, v, limits.sinks)

    return attend


def _build_calls(tree: SegmentTree, window: int | None, device: torch.device | None) -> list[AttentionCall]:
    """The calls of layers with this window, by which only longer documents are cut."""
    if window is None or tree.longest <= window:
        return [_build_call(tree, segments, device) for segments in _group_by_shape(tree)]
    return cut_segments(tree, window, PAD_STEP, device)


class _CallPlan:
    """The calls of layers with one window, and the order of their results.

    keeps_copies: keep the keys that each call has copied for the backward pass; False: it copies them again.
    """

    def __init__(self, calls: list[AttentionCall], num_rows: int, *, keeps_copies: bool = True) -> None:
        self.calls = calls
        self.run = _run_call if keeps_copies else _run_again_in_backward
        self.short = ShortAttention([call for call in calls if call.keys.shape[1] <= MAX_SHORT_KEYS])
        self.long = [call for call in calls if call.keys.shape[1] > MAX_SHORT_KEYS]
        self.index = _result_index(calls, num_rows, 0)
        self.long_index = _result_index(self.long, num_rows, num_rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is None and self.short.calls and q.dtype is torch.float32 and not q.is_cuda:
            out = self.short(q, k, v)
            if self.long_index is not None:
                out = torch.cat((out, *(self.run(call, q, k, v) for call in self.long)))
                out = out.index_select(0, self.long_index)
            return out
        parts = [self.run(call, q, k, v, sinks) for call in self.calls]
        if not parts:
            return q[:0]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.index is None else out.index_select(0, self.index)


def _result_index(calls: Sequence[AttentionCall], num_rows: int, start: int) -> Int[Tensor, " rows"] | None:
    """The index of each row's result; the results of `calls` begin at `start`. None: in order.

    A row that is no query of these calls has its result before `start`, at the row's index.
    """
    if not calls:
        return None
    index = torch.arange(num_rows, device=calls[0].queries.device)
    is_in_order = start == 0
    for call in calls:
        rows = call.queries.flatten()
        numbers = torch.arange(start, start + len(rows), device=rows.device)
        is_in_order = is_in_order and call.contiguous_rows == slice(start, start + len(rows))
        if call.is_padding is not None:
            is_real = ~call.is_padding.flatten()
            rows, numbers = rows[is_real], numbers[is_real]
        index[rows] = numbers
        start += call.queries.numel()
    return None if is_in_order else index


def _group_by_shape(tree: SegmentTree) -> list[np.ndarray]:
    """Groups of segments that share a call, without empty segments."""
    lengths, prefixes = tree.lengths, tree.prefixes
    is_padded = lengths + prefixes <= MAX_PADDED_KEYS
    shapes = np.stack((lengths, prefixes), 1)
    shapes = np.where(is_padded[:, None], -(-shapes // PAD_STEP) * PAD_STEP, shapes)
    groups: dict[tuple[int, int], list[int]] = {}
    for segment in np.flatnonzero(lengths).tolist():
        groups.setdefault(tuple(shapes[segment].tolist()), []).append(segment)
    return [np.array(segments) for segments in groups.values()]


def _build_call(tree: SegmentTree, segments: np.ndarray, device: torch.device | None) -> AttentionCall:
    """The call for these segments, padded to the longest of them.

    A segment's keys are those of its prefix, then those of the segment; both are padded at the end. The bias hides the
    padding of a prefix; the padding of a segment comes after all of its queries, so causality hides it.
    """
    rows, is_real = _padded_rows(tree.bounds[segments], tree.lengths[segments])
    is_contiguous = bool(is_real.all() and (np.diff(rows.ravel()) == 1).all())
    queries = torch.from_numpy(rows).to(device)
    keys, bias = queries, None
    if tree.prefixes[segments].any():
        prefix, is_prefix = _padded_prefixes(tree, segments)
        keys = torch.from_numpy(np.concatenate((prefix, rows), axis=1)).to(device)
        if not is_prefix.all():
            num = rows.shape[1]
            is_hidden = np.broadcast_to(~is_prefix[:, None], (len(segments), num, prefix.shape[1]))
            is_later = np.broadcast_to(np.triu(np.ones((num, num), bool), 1), (len(segments), num, num))
            hidden = np.concatenate((is_hidden, is_later), axis=2)
            bias = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(device)
    return AttentionCall(
        queries=queries,
        keys=keys,
        is_padding=None if is_real.all() else torch.from_numpy(~is_real).to(device),
        bias=bias,
        contiguous_rows=slice(int(rows[0, 0]), int(rows[-1, -1]) + 1) if is_contiguous else None,
    )


def _padded_rows(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row indices [segments, longest], padded with the first row, and a mask of real ones."""
    offsets = np.arange(lengths.max())
    is_real = offsets < lengths[:, None]
    return starts[:, None] + np.where(is_real, offsets, 0), is_real


def _padded_prefixes(tree: SegmentTree, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for the tokens of the segments' ancestors."""
    counts = tree.prefixes[segments]
    is_real = np.arange(counts.max()) < counts[:, None]
    rows = np.empty(is_real.shape, np.int64)
    for row, segment in zip(rows, segments.tolist()):
        seen = tree.prefix_rows(segment)
        row[: len(seen)], row[len(seen) :] = seen, seen[0] if len(seen) else tree.bounds[segment]
    return rows, is_real


def _run_call(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The results of one call, [segments * queries, heads, head_dim]."""

    def rows_of(x: Tensor, rows: Tensor) -> Tensor:
        is_contiguous = rows is call.queries and call.contiguous_rows is not None
        x = x[call.contiguous_rows] if is_contiguous else x.index_select(0, rows.flatten())
        return x.unflatten(0, rows.shape)

    queries, keys, values = rows_of(q, call.queries), rows_of(k, call.keys), rows_of(v, call.keys)
    if sinks is not None:
        return attend_with_sinks(queries, keys, values, sinks, call.bias).flatten(0, 1)
    return _causal(queries, keys, values, call.bias)


def _run_again_in_backward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """As `_run_call`, of which only q, k and v are kept for the backward pass."""
    again: Tensor = checkpoint(_run_call, call, q, k, v, sinks, use_reentrant=False, preserve_rng_state=False)
    return again


def _causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention of segments, queries aligned with the last keys.

    q: [segments, queries, heads, dim]; k, v: [segments, keys, kv heads, dim]. bias: [segments, queries, keys], added to
    the scores instead of the causal mask.
    """
    queries, keys = q.shape[1], k.shape[1]
    mask = None
    if bias is not None:
        mask = bias.to(q.dtype).unsqueeze(1)
    elif queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


@functools.cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention over ragged rows; None if this torch lacks it or its options."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = inspect.signature(varlen_attn).parameters
    if "window_size" not in options:
        return None
    kernel = cast("Callable[..., Tensor]", varlen_attn)  # its other results are for other options
    # Before torch 2.12 keys of fewer heads need no option.
    return functools.partial(kernel, enable_gqa=True) if "enable_gqa" in options else kernel


def _supports_varlen(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _varlen_kernel() is not None


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Int[Tensor, " bounds"], longest: int, window: int | None
) -> Tensor:
    """Flash attention over all documents in one kernel."""
    kernel = _varlen_kernel()
    assert kernel is not None
    window_size = (-1 if window is None else window - 1, 0)
    return kernel(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=window_size)
