"""Contiguous keys and values of sequences that are being decoded, read without gathering blocks.

A slab has one row for each sequence whose next token needs the same width of keys (kv_cache.py). A row is filled
from the sequence's blocks when the sequence enters the slab. Each pass then adds one token to the row and writes the
same token to the blocks, so a row can be dropped at any time. A row is identified by the allocation id of its
sequence and the position of the next token. A slot gets a new allocation id whenever it gets blocks (scheduler.py): for
another sequence, or after a preemption. So a row is never read for a sequence whose keys it does not have.

Rows 0..n of a slab are in use, so products run over a view of it. When sequences leave, sequences of the last rows in
use are filled into the gaps. Sequences for which there is no memory (`max_tokens`) are read from their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int64

    from stretto.families.shape import ModelConfig


@dataclass(eq=False)
class Slab:
    """Rows of `width` keys.

    keys: [layers, capacity, kv_heads, dim, width] if exact, else shaped like values.
    values: [layers, capacity, kv_heads, width, dim].
    bias: [capacity, kv_heads or 1, 1, width], 0 or -inf. window_bias: for layers with a window, if there are any.
    allocation_ids and upcoming (the position of the next token) have an entry per row in use.
    """

    width: int
    keys: Tensor
    values: Tensor
    bias: Tensor
    window_bias: Tensor | None
    window: int | None
    allocation_ids: Int[np.ndarray, " rows"] = field(default_factory=lambda: np.empty(0, np.int64))
    upcoming: Int[np.ndarray, " rows"] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]


@dataclass(eq=False, slots=True)
class SlabPart:
    """Rows [start, stop) of a pass, which are rows [low, low + stop - start) of a slab.

    keys, values: views of these rows, by layer, in the shape that attention takes ([rows * kv_heads, ...] if exact).
    """

    start: int
    stop: int
    keys: list[Tensor]
    values: list[Tensor]
    bias: Tensor
    window_bias: Tensor | None
    _key_rows: list[Tensor]  # the same memory, [rows, width, kv_heads, dim]
    _value_rows: list[Tensor]
    _bias_rows: list[Tensor]  # [rows, width, kv_heads or 1], of bias and window_bias
    _window: int | None
    _rows: Tensor
    _positions: Tensor
    _upcoming: Int[np.ndarray, " rows"]  # a view of the slab's

    @classmethod
    def of(cls, slab: Slab, low: int, start: int, stop: int, group: int, *, is_exact: bool) -> SlabPart:
        """Views of rows [low, low + stop - start) of a slab; group: query heads per key head."""
        count = stop - start
        keys, values = (x[:, low : low + count] for x in (slab.keys, slab.values))
        bias = slab.bias[low : low + count]
        rows = torch.arange(count, device=bias.device)
        by_position = keys.permute(0, 1, 4, 2, 3) if is_exact else keys.transpose(2, 3)
        key_rows, value_rows = by_position.unbind(), values.transpose(2, 3).unbind()
        window_bias = None if slab.window_bias is None else slab.window_bias[low : low + count]
        biases = [bias] if window_bias is None else [bias, window_bias]
        bias_rows = [x.squeeze(2).transpose(1, 2) for x in biases]
        if is_exact:
            keys, values = keys.flatten(1, 2), values.flatten(1, 2)
            bias, *rest = [x.flatten(0, 1).expand(-1, group, -1) for x in biases]
            window_bias = rest[0] if rest else None
        return cls(
            start, stop, list(keys.unbind()), list(values.unbind()), bias, window_bias, list(key_rows),
            list(value_rows), bias_rows, slab.window, rows, rows, slab.upcoming[low : low + count],
        )  # fmt: skip

    def seek(self, positions: Int[Tensor, " rows"]) -> None:
        """Set the positions of the rows' new tokens, for `write` and for attention."""
        self._positions = positions
        for bias in self._bias_rows:
            bias[self._rows, positions] = 0.0
        if self._window is not None:
            # The first token of a sequence that is not longer than the window stays.
            bias, leaving = self._bias_rows[1], positions - self._window
            first = bias[self._rows, 0]
            hidden = torch.full_like(first, float("-inf"))
            bias[self._rows, leaving.clamp(min=0)] = torch.where((leaving >= 0)[:, None], hidden, first)
        self._upcoming += 1

    def write(self, layer: int, k: Float[Tensor, "rows kv_heads dim"], v: Float[Tensor, "rows kv_heads dim"]) -> None:
        self._key_rows[layer][self._rows, self._positions] = k
        self._value_rows[layer][self._rows, self._positions] = v


@dataclass(frozen=True, slots=True)
class SlabFill:
    """Slab rows to fill: rows[i] gets the keys before positions[i] of pass row sources[i]'s sequence."""

    slab: Slab
    rows: Int[np.ndarray, " fill"]
    sources: Int[np.ndarray, " fill"]
    positions: Int[np.ndarray, " fill"]


class RunningKV:
    """All slabs, by index of their width."""

    def __init__(
        self, config: ModelConfig, widths: Int64[np.ndarray, " widths"], *, max_tokens: int, dtype: torch.dtype,
        device: torch.device, is_exact: bool,
    ) -> None:  # fmt: skip
        self.config, self.widths, self.max_tokens = config, widths, max_tokens
        self.dtype, self.device, self.is_exact = dtype, device, is_exact
        self.slabs: dict[int, Slab] = {}

    @property
    def num_tokens(self) -> int:
        """Keys for which the slabs have allocated memory."""
        return sum(slab.capacity * slab.width for slab in self.slabs.values())

    def place(
        self, allocation_ids: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"],
        width_index: Int[np.ndarray, " rows"], is_decoded: Bool[np.ndarray, " rows"], *, padding: int,
    ) -> tuple[Int[np.ndarray, " rows"], list[SlabFill]]:  # fmt: skip
        """A slab row for each row of a pass (-1: it reads its blocks), and the slab rows to fill first.

        padding: the most rows with which the pass may be padded; a slab has space for them after those in use.
        """
        places = np.full(len(allocation_ids), -1)
        fills = []
        decoded = np.flatnonzero(is_decoded)
        indices = np.unique(width_index[decoded]).tolist()
        for index in indices:
            rows = decoded[width_index[decoded] == index]
            slab = self._ensure_capacity(index, len(rows) + padding, needed=indices)
            if slab is None:
                continue
            places[rows], is_filled = _assign(slab, allocation_ids[rows], positions[rows])
            slab.allocation_ids, slab.upcoming = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
            slab.allocation_ids[places[rows]] = allocation_ids[rows]
            slab.upcoming[places[rows]] = positions[rows]
            if not is_filled.all():
                new = rows[~is_filled]
                fills.append(SlabFill(slab, places[new], new, positions[new]))
        return places, fills

    def _ensure_capacity(self, index: int, num_rows: int, needed: list[int]) -> Slab | None:
        """The slab of this width, grown to num_rows if needed; None if there is no memory for it.

        Slabs whose width is not needed in this pass are dropped if memory is short; their rows are filled again later.
        """
        slab, width = self.slabs.get(index), int(self.widths[index])
        if slab is not None and num_rows <= slab.capacity:
            return slab
        capacity = 1 << (num_rows - 1).bit_length()
        if not self._fits(index, capacity):
            self.slabs = {i: other for i, other in self.slabs.items() if i in needed}
            capacity = capacity if self._fits(index, capacity) else num_rows
        if not self._fits(index, capacity):
            return None
        self.slabs[index] = grown = self._build(width, capacity)
        if slab is not None:
            num_used = len(slab.allocation_ids)
            for new, old in ((grown.keys, slab.keys), (grown.values, slab.values)):
                new[:, :num_used] = old[:, :num_used]
            grown.bias[:num_used] = slab.bias[:num_used]
            if slab.window_bias is not None and grown.window_bias is not None:
                grown.window_bias[:num_used] = slab.window_bias[:num_used]
            grown.allocation_ids, grown.upcoming = slab.allocation_ids, slab.upcoming
        return grown

    def _fits(self, index: int, capacity: int) -> bool:
        others = sum(slab.capacity * slab.width for i, slab in self.slabs.items() if i != index)
        return others + capacity * int(self.widths[index]) <= self.max_tokens

    def _build(self, width: int, capacity: int) -> Slab:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        shape = (len(self.config.attending_layers), capacity, heads)
        bias = (capacity, heads if self.is_exact else 1, 1, width)
        zeros = lambda *sizes: torch.zeros(*sizes, dtype=self.dtype, device=self.device)
        return Slab(
            width,
            keys=zeros(*shape, dim, width) if self.is_exact else zeros(*shape, width, dim),
            values=zeros(*shape, width, dim),
            bias=zeros(*bias),
            window_bias=None if self.config.window is None else zeros(*bias),
            window=self.config.window,
        )


def _assign(
    slab: Slab, allocation_ids: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]
) -> tuple[Int[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """A slab row for each sequence (rows 0..len), and whether the row holds its keys already."""
    count = len(allocation_ids)
    if np.array_equal(slab.allocation_ids, allocation_ids) and np.array_equal(slab.upcoming, positions):
        return np.arange(count), np.ones(count, np.bool_)
    places = np.full(count, -1)
    if len(slab.allocation_ids):
        by_id = np.argsort(slab.allocation_ids)
        at = by_id[np.minimum(np.searchsorted(slab.allocation_ids[by_id], allocation_ids), len(by_id) - 1)]
        is_filled = (slab.allocation_ids[at] == allocation_ids) & (slab.upcoming[at] == positions) & (at < count)
        places[is_filled] = at[is_filled]
    is_filled = places >= 0
    is_free = np.ones(count, np.bool_)
    is_free[places[is_filled]] = False
    places[~is_filled] = np.flatnonzero(is_free)
    return places, is_filled
