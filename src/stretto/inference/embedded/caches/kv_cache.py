"""Keys and values in blocks, and the attention that reads them.

Every query row (one token, of a prompt or of a sequence being decoded) attends over the cached keys of its sequence,
padded to one of a few widths that depends on its own position only. In float32 on a CPU (`is_exact`) the shapes of the
matrix products do not depend on the rest of the batch, on how a prompt was cut into chunks, or on what came from the
prefix cache, so a row has equal bits in every batch. Rows of one long prompt share one read of its keys; sequences
that are being decoded have their keys in one piece (running.py). A cache of an add-on's kernels replaces this.

Shape of the cache: [layers that attend, 2 * kv_heads, blocks, block_size * head_dim], keys before values, so that one
row gather yields a batch of [keys, head_dim] matrices for a batched product without another copy. The states of
recurrent layers are beside it (`States` in runner.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.families.shape import ModelConfig
from stretto.inference.embedded.caches.running import RunningKV, SlabFill, SlabPart
from stretto.models.device.kernels import PassKernels
from stretto.models.parts.attend import NO_LIMITS, Attend, Limits
from stretto.models.parts.sinks import attend_with_sinks

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Int64

_MIN_SHARED_ROWS = 32  # from so many rows of one sequence and width, they share one gather
_MAX_ELEMENTS = 1 << 22  # elements of the keys or scores of one product


@dataclass(slots=True)
class PassRows:
    """Rows of a pass: row i is token positions[i] of slot owners[i] (-1: padding).

    rotations: positions by which rows are rotated, [rows] or [3, rows] (vision/rows.py); None: `positions`.

    Row i reads widths[width_index[i]] keys. They are in row places[i] of the slab of that width or, if places[i] is
    -1, in the blocks of the slot's row of `tables`. Rows are sorted by width_index; of one width, rows in slabs come
    first, in the order of their places.
    """

    owners: Int[np.ndarray, " rows"]
    positions: Int[np.ndarray, " rows"]
    width_index: Int[np.ndarray, " rows"]
    places: Int[np.ndarray, " rows"]
    tables: Int[np.ndarray, "slots blocks"]
    rotations: Int[np.ndarray, "*axes rows"] | None = None

    def cut(self, rows: slice) -> PassRows:
        cut = lambda x: x[rows]
        rotations = None if self.rotations is None else self.rotations[..., rows]
        return PassRows(
            cut(self.owners), cut(self.positions), cut(self.width_index), cut(self.places), self.tables, rotations
        )

    def advance(self) -> None:
        """Move each row one token further; all are behind their prompts."""
        self.positions += 1
        if self.rotations is not None:
            self.rotations += 1


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Rows [start, stop) of a pass that read keys from blocks."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _KeysPart(BlockPart):
    """Rows that read `width` keys; is_shared: all are of one sequence."""

    width: int
    is_shared: bool
    gather: Tensor  # int64, indices into the flattened [2 * kv_heads * blocks] dim
    bias: Tensor  # 0 or -inf, in the shape that attention over this part needs
    window_bias: Tensor | None  # for layers with a window


@dataclass(slots=True)
class PassLayout:
    """Where the rows of one forward pass write their keys, and which keys they read."""

    rows: PassRows
    write: Tensor  # int64 [rows], indices into the flattened [blocks * block_size] dim
    parts: list[BlockPart | SlabPart]


def free_memory() -> int:
    """Bytes of unused memory of this machine."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def key_widths(block_size: int, max_len: int) -> Int64[np.ndarray, " widths"]:
    """Multiples of block_size and 16; from the second on they grow by at most a half: 16, 32, 48, 64, 96, ..."""
    # BLAS and softmax may give other bits for other widths, so smaller blocks have the same widths.
    unit = math.lcm(block_size, 16)
    widths, width = [], unit
    while True:
        widths.append(width)
        if width >= max_len:
            return np.array(widths, np.int64)
        step = 1 << (width.bit_length() - 2)
        width = -(-((width // step + 1) * step) // unit) * unit


class KVCache:
    """The tensors of all blocks of all layers, and the slabs of sequences that are being decoded."""

    kernels: PassKernels | None = None
    """What reads blocks in place, without slabs, and computes the rest of a pass; None: torch's operations."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, max_len: int, *, dtype: torch.dtype,
        device: torch.device, is_exact: bool, slab_tokens: int = 0,
    ) -> None:  # fmt: skip
        """slab_tokens: the most keys in slabs, besides those in blocks; 0: all keys are read from blocks."""
        self.num_blocks, self.block_size, self.is_exact = num_blocks, block_size, is_exact
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.window, self.is_varied = config.window, config.is_attention_varied
        # Query heads per key head; if layers differ in it, biases are broadcast over it.
        self.group = 1 if self.is_varied else config.num_heads // config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.device = device
        self._nth = {layer: i for i, layer in enumerate(config.attending_layers)}
        shape = (len(self._nth), 2 * config.num_kv_heads, num_blocks, block_size * config.head_dim)
        self.blocks = self._allocate(shape, dtype)
        by_token = self.blocks.view(*shape[:2], num_blocks * block_size, config.head_dim).transpose(1, 2)
        self._tokens = list(by_token.unbind())  # by layer: [blocks * block_size, 2 * kv_heads, dim]
        self.widths = key_widths(block_size, max_len)
        self._planes = torch.arange(2 * config.num_kv_heads).unsqueeze(1)
        self.running = RunningKV(
            config, self.widths, max_tokens=slab_tokens, dtype=dtype, device=device, is_exact=is_exact
        )

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Keys and values that are not written yet are multiplied by 0, so they must be numbers.
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        return 2 * len(config.attending_layers) * config.num_kv_heads * config.head_dim * dtype.itemsize

    def copy_blocks(self, source: Int64[np.ndarray, " blocks"], target: Int64[np.ndarray, " blocks"]) -> None:
        """Copy whole blocks in all layers, as a fork needs for half-full last blocks."""
        src, dst = torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device)
        self.blocks.index_copy_(2, dst, self.blocks.index_select(2, src))

    def width_index(self, positions: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """The index in `widths` for a query at each position."""
        return np.searchsorted(self.widths, positions + 1)

    def fill(self, fill: SlabFill, tables: Int[np.ndarray, "rows blocks"]) -> None:
        """Copy keys and values of sequences with these blocks into the rows of a slab."""
        slab, count = fill.slab, len(fill.rows)
        num_blocks = slab.width // self.block_size
        index = torch.from_numpy(_columns(tables, num_blocks).reshape(-1)).to(self.device)
        rows = torch.from_numpy(fill.rows).to(self.device)
        shape = (2, self.num_kv_heads, count, slab.width, self.head_dim)
        for layer, blocks in enumerate(self.blocks):
            keys, values = blocks.index_select(1, index).view(shape).transpose(1, 2)
            if self.is_exact:
                keys = keys.transpose(2, 3)
            slab.keys[layer].index_copy_(0, rows, keys)
            slab.values[layer].index_copy_(0, rows, values)
        columns, upcoming = np.arange(slab.width), fill.positions[:, None]
        slab.bias[rows] = self._bias(columns >= upcoming)[:, None, None]
        if slab.window_bias is not None:
            is_hidden = (columns >= upcoming) | (columns <= upcoming - self.window)
            slab.window_bias[rows] = self._bias(is_hidden)[:, None, None]

    def layout(self, rows: PassRows) -> PassLayout:
        """Plan what the rows of a pass write and read; `advance` reuses it for the next token."""
        parts: list[BlockPart | SlabPart] = []
        is_placed = rows.places >= 0
        is_cut = (np.diff(rows.width_index) != 0) | (is_placed[1:] != is_placed[:-1])
        cuts = (np.flatnonzero(is_cut) + 1).tolist()
        for start, stop in zip([0, *cuts], [*cuts, len(rows.owners)]):
            index = int(rows.width_index[start])
            if is_placed[start]:
                slab, low = self.running.slabs[index], int(rows.places[start])
                parts.append(SlabPart.of(slab, low, start, stop, self.group, is_exact=self.is_exact))
            else:
                parts += self._cut_width(rows, start, stop, int(self.widths[index]))
        layout = PassLayout(rows, torch.empty(0), parts)
        self.advance(layout)
        return layout

    def advance(self, layout: PassLayout) -> None:
        """Update where the rows write after their positions have changed; they keep their slab rows."""
        rows, bs = layout.rows, self.block_size
        block = rows.tables[rows.owners, rows.positions // bs]
        if rows.owners[-1] < 0:
            block = np.where(rows.owners >= 0, block, 0)
        layout.write = torch.from_numpy(block * bs + rows.positions % bs).to(self.device)
        for part in layout.parts:
            if isinstance(part, SlabPart):
                part.seek(torch.from_numpy(rows.positions[part.start : part.stop]).to(self.device))

    def _cut_width(self, rows: PassRows, start: int, stop: int, width: int) -> Iterator[BlockPart]:
        """Cut rows of one width into long runs of one sequence, and chunks of all other rows."""
        pending = start
        if stop - start >= _MIN_SHARED_ROWS:
            cuts = (np.flatnonzero(np.diff(rows.owners[start:stop])) + 1 + start).tolist()
            for low, high in zip([start, *cuts], [*cuts, stop]):
                if high - low >= _MIN_SHARED_ROWS and rows.owners[low] >= 0:
                    yield from self._chunks(rows, pending, low, width, is_shared=False)
                    yield from self._chunks(rows, low, high, width, is_shared=True)
                    pending = high
        yield from self._chunks(rows, pending, stop, width, is_shared=False)

    def _chunks(self, rows: PassRows, start: int, stop: int, width: int, *, is_shared: bool) -> Iterator[BlockPart]:
        per_row = width * (self.group * self.num_kv_heads if is_shared else self.num_kv_heads * self.head_dim)
        step = max(_MAX_ELEMENTS // per_row, 16)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            gather = self._gather(rows, low, low + 1 if is_shared else high, width // self.block_size)
            distance = rows.positions[low:high, None] - np.arange(width)[None, :]
            bias = self._shape_bias(self._bias(distance < 0), is_shared)
            window_bias = None
            if self.window is not None:
                is_hidden = (distance < 0) | (distance >= self.window)
                window_bias = self._shape_bias(self._bias(is_hidden), is_shared)
            yield _KeysPart(low, high, width, is_shared, gather, bias, window_bias)

    def _bias(self, is_hidden: np.ndarray) -> Tensor:
        bias = torch.from_numpy(np.where(is_hidden, np.float32(-np.inf), np.float32(0)))
        return bias.to(device=self.device, dtype=self.blocks.dtype)

    def _gather(self, rows: PassRows, low: int, high: int, num_blocks: int) -> Tensor:
        """Indices of the first num_blocks blocks of these rows' sequences, keys before values."""
        owners = rows.owners[low:high]
        table = _columns(rows.tables[owners], num_blocks)
        if owners[-1] < 0:
            table = np.where(owners[:, None] >= 0, table, 0)
        index = torch.from_numpy(np.ascontiguousarray(table).reshape(-1)).unsqueeze(0)
        return (index + self._planes * self.num_blocks).reshape(-1).to(self.device)

    def _shape_bias(self, bias: Float[Tensor, "rows width"], is_shared: bool) -> Tensor:
        rows, width = bias.shape
        if not self.is_exact:
            return bias if is_shared else bias.view(rows, 1, 1, width)
        heads = 1 if is_shared else self.num_kv_heads
        return bias.view(1, rows, 1, width).expand(heads, -1, self.group, -1).reshape(-1, self.group, width)

    def attend(self, layout: PassLayout) -> Attend:
        """The attention function of one pass: it writes the rows' keys and values, then attends."""
        parts = [part for part in layout.parts if isinstance(part, (SlabPart, _KeysPart))]
        assert len(parts) == len(layout.parts)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
            layer = self._nth[layer]
            self._tokens[layer].index_copy_(0, layout.write, torch.cat((k, v), dim=1))
            out = [self._read(part, layer, q, k, v, limits) for part in parts]
            return out[0] if len(out) == 1 else torch.cat(out)

        return attend

    def _read(
        self, part: _KeysPart | SlabPart, layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits
    ) -> Float[Tensor, "rows heads dim"]:
        if q.shape[0] != part.stop - part.start:
            q, k, v = (x[part.start : part.stop] for x in (q, k, v))
        bias = part.bias if limits.window is None else part.window_bias
        assert bias is not None, "a layer with a window has a bias of its own"
        rows, kv_heads = q.shape[0], self.num_kv_heads
        if isinstance(part, SlabPart):
            part.write(layer, k, v)
            if self.is_exact:
                q = q.reshape(rows * kv_heads, -1, self.head_dim)
                sinks = limits.sinks
                if sinks is not None:
                    sinks = sinks.view(1, kv_heads, -1, 1).expand(rows, -1, -1, -1).flatten(0, 1)
                out = self._softmax(q, part.keys[layer], part.values[layer], bias, sinks)
                return out.view(rows, -1, self.head_dim)
            keys, values = part.keys[layer], part.values[layer]
            return self._fused(q.unsqueeze(2), keys, values, bias, limits.sinks).squeeze(2)
        blocks = self.blocks[layer].view(-1, self.block_size * self.head_dim)
        gathered = blocks.index_select(0, part.gather)
        # [kv_heads, rows, group, dim]
        q = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)
        read = self._read_exactly if self.is_exact else self._read_fused
        return read(q, gathered, part, bias, limits.sinks).transpose(0, 1).flatten(1, 2)

    def _read_exactly(self, q: Tensor, gathered: Tensor, part: _KeysPart, bias: Tensor, sinks: Tensor | None) -> Tensor:
        """Softmax attention as one [group, dim] product per row, whatever the shape of the batch."""
        kv_heads, rows, group, dim = q.shape
        k, v = gathered.view(2, -1, part.width, dim)  # dim 1: kv_heads if shared, else kv_heads * rows
        k = k.transpose(1, 2).contiguous()  # as in slabs: products with [dim, width] are faster
        if sinks is not None:
            sinks = sinks.view(kv_heads, 1, group, 1).expand(-1, rows, -1, -1)
        if not part.is_shared:
            by_row = None if sinks is None else sinks.flatten(0, 1)
            return self._softmax(q.reshape(-1, group, dim), k, v, bias, by_row).view(kv_heads, rows, group, dim)
        # Every row multiplies the same keys; `expand` does not copy them.
        spread = lambda x: x.expand(rows, -1, -1)
        return torch.stack(
            [
                self._softmax(q[h], spread(k[h]), spread(v[h]), bias, None if sinks is None else sinks[h])
                for h in range(kv_heads)
            ]
        )

    def _softmax(
        self,
        q: Float[Tensor, "batch group dim"],
        k: Float[Tensor, "batch dim width"],
        v: Tensor,
        bias: Tensor,
        sinks: Float[Tensor, "batch group 1"] | None,
    ) -> Tensor:
        if q.shape[0] == 1:  # BLAS uses another kernel for a batch of one
            sinks = None if sinks is None else sinks.expand(2, -1, -1)
            twice = lambda x: x.expand(2, -1, -1)
            return self._softmax(twice(q), twice(k), twice(v), twice(bias), sinks)[:1]
        scores = torch.baddbmm(bias, q, k, alpha=self.scale)
        if sinks is None:
            return torch.bmm(torch.softmax(scores, dim=-1), v)
        # The sink comes first, so that the order of the sum does not depend on the width.
        weights = torch.softmax(torch.cat((sinks, scores), dim=-1), dim=-1)
        return torch.bmm(weights[..., 1:].contiguous(), v)

    def _read_fused(self, q: Tensor, gathered: Tensor, part: _KeysPart, bias: Tensor, sinks: Tensor | None) -> Tensor:
        """PyTorch's fused attention, as in the trainer: scores are float32 for every dtype."""
        kv_heads, rows, group, dim = q.shape
        k, v = gathered.view(2, kv_heads, -1, part.width, dim).transpose(1, 2)
        if part.is_shared:
            q = q.transpose(1, 2).reshape(1, kv_heads * group, rows, dim)
            out = self._fused(q, k, v, bias, sinks)
            return out.view(kv_heads, group, rows, dim).transpose(1, 2)
        q = q.transpose(0, 1).reshape(rows, kv_heads * group, 1, dim)
        return self._fused(q, k, v, bias, sinks).reshape(rows, kv_heads, group, dim).transpose(0, 1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
        """q [segments, heads, rows, dim], k and v [segments, kv_heads, width, dim]."""
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)
        by_segment = bias.expand(len(q), 1, -1, -1)[:, 0] if bias.dim() == 4 else bias.unsqueeze(0)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend_with_sinks(q, k, v, sinks, by_segment).transpose(1, 2)


def _columns(tables: Int[np.ndarray, "rows blocks"], num_blocks: int) -> Int[np.ndarray, "rows columns"]:
    """The first num_blocks columns, padded with the null block if the table is narrower."""
    missing = num_blocks - tables.shape[1]
    if missing > 0:
        return np.pad(tables, ((0, 0), (0, missing)))
    return np.ascontiguousarray(tables[:, :num_blocks])
