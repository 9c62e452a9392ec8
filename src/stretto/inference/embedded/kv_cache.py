"""Keys and values in blocks, and the attention that reads them.

Every query row (one token, whether it is being decoded or stands in a prompt) attends over the cached keys of
its sequence, padded to one of a few widths that depends on its own position only. In float32 on a CPU
(`is_exact`) it does so by matrix products whose shape does not depend on the rest of the batch, on how a
prompt was cut into chunks, or on what came from the prefix cache: equal bits in every batch. Rows of one long
prompt share one read of its keys.

Layout: [layers, 2 * kv_heads, blocks, block_size * head_dim], keys before values, so that one row gather
yields a batch of [keys, head_dim] matrices for a batched product without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.config import ModelConfig
from stretto.models.decoder import Attend

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_SHARED_ROWS = 32  # rows of one sequence and width from which they share one gather
_MAX_ELEMENTS = 1 << 22  # keys gathered or scores made in one product


@dataclass(frozen=True, slots=True)
class _Rows:
    """Row i is token positions[i] of slot owners[i] (-1: padding); tables[slot] are the slot's blocks."""

    owners: Int[np.ndarray, " rows"]
    positions: Int[np.ndarray, " rows"]
    tables: Int[np.ndarray, "slots blocks"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [start, stop) read `width` keys, which `gather` picks; all of one sequence if is_shared."""

    start: int
    stop: int
    width: int
    is_shared: bool
    gather: Tensor  # int64, rows of the flattened [2 * kv_heads * blocks] dim
    bias: Tensor  # 0 or -inf, in the shape that the part's product takes


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of one forward pass write, and what they read."""

    write: Tensor  # int64 [2 * kv_heads * rows], in the flattened [2 * kv_heads * blocks * block_size] dim
    parts: tuple[_Part, ...]


def key_widths(block_size: int, max_len: int) -> np.ndarray:
    """Multiples of block_size, growing by at most a half (twice at the start): 16, 32, 48, 64, 96, ..."""
    widths, width = [], -(-16 // block_size) * block_size
    while True:
        widths.append(width)
        if width >= max_len:
            return np.array(widths, np.int64)
        step = 1 << (width.bit_length() - 2)
        width = -(-((width // step + 1) * step) // block_size) * block_size


class KVCache:
    """The tensors of all blocks of all layers."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, max_len: int, *, dtype: torch.dtype,
        device: torch.device, is_exact: bool,
    ) -> None:  # fmt: skip
        self.num_blocks, self.block_size, self.is_exact = num_blocks, block_size, is_exact
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.device = device
        shape = (config.num_layers, 2 * config.num_kv_heads, num_blocks, block_size * config.head_dim)
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.widths = key_widths(block_size, max_len)
        self._planes = torch.arange(2 * config.num_kv_heads).unsqueeze(1)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole blocks in all layers: what a fork does with its half-full last block."""
        src, dst = torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device)
        self.blocks.index_copy_(2, dst, self.blocks.index_select(2, src))

    def width_index(self, positions: Int[np.ndarray, " rows"]) -> np.ndarray:
        """Which of `widths` a query at each position uses; rows are sorted by it before `layout`."""
        return np.searchsorted(self.widths, positions + 1)

    def layout(
        self, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"],
        tables: Int[np.ndarray, "slots blocks"], width_index: Int[np.ndarray, " rows"],
    ) -> Layout:  # fmt: skip
        """Row i is token positions[i] of slot owners[i] (-1: padding); rows are sorted by width_index."""
        rows, bs = _Rows(owners, positions, tables), self.block_size
        block = np.where(owners >= 0, tables[owners, positions // bs], 0)
        write = torch.from_numpy(block * bs + positions % bs)
        write = (write.unsqueeze(0) + self._planes * (self.num_blocks * bs)).reshape(-1).to(self.device)
        cuts = np.flatnonzero(np.diff(width_index)) + 1
        parts: list[_Part] = []
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(owners)]):
            parts += self._cut_width(rows, start, stop, int(self.widths[width_index[start]]))
        return Layout(write, tuple(parts))

    def _cut_width(self, rows: _Rows, start: int, stop: int, width: int) -> Iterator[_Part]:
        """Cut rows of one width into long runs of one sequence and chunks of everything else."""
        pending = start
        if stop - start >= _SHARED_ROWS:
            cuts = (np.flatnonzero(np.diff(rows.owners[start:stop])) + 1 + start).tolist()
            for low, high in zip([start, *cuts], [*cuts, stop]):
                if high - low >= _SHARED_ROWS and rows.owners[low] >= 0:
                    yield from self._chunks(rows, pending, low, width, is_shared=False)
                    yield from self._chunks(rows, low, high, width, is_shared=True)
                    pending = high
        yield from self._chunks(rows, pending, stop, width, is_shared=False)

    def _chunks(self, rows: _Rows, start: int, stop: int, width: int, *, is_shared: bool) -> Iterator[_Part]:
        per_row = width * (self.group * self.num_kv_heads if is_shared else self.num_kv_heads * self.head_dim)
        step = max(_MAX_ELEMENTS // per_row, 16)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            gather = self._gather(rows, low, low + 1 if is_shared else high, width // self.block_size)
            is_hidden = np.arange(width)[None, :] > rows.positions[low:high, None]
            bias = torch.from_numpy(np.where(is_hidden, np.float32(-np.inf), np.float32(0)))
            bias = self._shape_bias(bias.to(device=self.device, dtype=self.blocks.dtype), is_shared)
            yield _Part(low, high, width, is_shared, gather, bias)

    def _gather(self, rows: _Rows, low: int, high: int, num_blocks: int) -> Tensor:
        """Cache rows of the first num_blocks blocks of these rows' sequences, all keys, then all values."""
        owners = rows.owners[low:high]
        table = rows.tables[owners, :num_blocks]
        if table.shape[1] < num_blocks:
            table = np.pad(table, ((0, 0), (0, num_blocks - table.shape[1])))
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

    def attend(self, layout: Layout) -> Attend:
        """The attention of one pass: writes the rows' keys and values, then reads what each may see."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows, heads, dim = q.shape
            blocks = self.blocks[layer]
            new = torch.cat((k.transpose(0, 1), v.transpose(0, 1))).view(-1, dim)
            blocks.view(-1, dim).index_copy_(0, layout.write, new)
            blocks = blocks.view(-1, self.block_size * dim)
            # [kv_heads, rows, group, dim]
            q = q.view(rows, self.num_kv_heads, self.group, dim).transpose(0, 1)
            read = self._read_exactly if self.is_exact else self._read
            out = [read(q[:, p.start : p.stop], blocks.index_select(0, p.gather), p) for p in layout.parts]
            merged = out[0] if len(out) == 1 else torch.cat(out, dim=1)
            return merged.transpose(0, 1).reshape(rows, heads, dim)

        return attend

    def _read_exactly(self, q: Tensor, gathered: Tensor, part: _Part) -> Tensor:
        """Softmax attention as one [group, dim] product a row, so that no row sees the batch's shape."""
        kv_heads, rows, group, dim = q.shape
        k, v = gathered.view(2, -1, part.width, dim)  # of kv_heads sequences if shared, else kv_heads * rows
        if not part.is_shared:
            return self._softmax(q.reshape(-1, group, dim), k, v, part.bias).view(kv_heads, rows, group, dim)
        # Every row multiplies the same keys; they are not copied (stride 0).
        spread = lambda x: x.expand(rows, -1, -1)
        return torch.stack(
            [self._softmax(q[h], spread(k[h]), spread(v[h]), part.bias) for h in range(kv_heads)]
        )

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if len(q) == 1:  # BLAS has another kernel for a batch of one
            return self._softmax(*(x.expand(2, -1, -1) for x in (q, k, v, bias)))[:1]
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=self.scale)
        return torch.bmm(torch.softmax(scores, dim=-1), v)

    def _read(self, q: Tensor, gathered: Tensor, part: _Part) -> Tensor:
        """The library's fused attention, as in the trainer: scores stay in float32 whatever the dtype."""
        kv_heads, rows, group, dim = q.shape
        k, v = gathered.view(2, kv_heads, -1, part.width, dim).transpose(1, 2)
        attend = partial(
            F.scaled_dot_product_attention, attn_mask=part.bias, scale=self.scale, enable_gqa=True
        )
        if part.is_shared:
            q = q.transpose(1, 2).reshape(1, kv_heads * group, rows, dim)
            return attend(q, k, v).view(kv_heads, group, rows, dim).transpose(1, 2)
        q = q.transpose(0, 1).reshape(rows, kv_heads * group, 1, dim)
        return attend(q, k, v).reshape(rows, kv_heads, group, dim).transpose(0, 1)
