"""Keys and values in blocks, and the attention that reads them.

Every query row (one token, whether it is being decoded or stands in a prompt) attends over the cached keys of
its sequence, padded to one of a few widths that depends on its own position only. In float32 on a CPU
(`is_exact`) it does so by matrix products whose shape does not depend on the rest of the batch, on how a
prompt was cut into chunks, or on what came from the prefix cache: equal bits in every batch. Rows of one long
prompt share one read of its keys.

Layout: [layers, kv_heads, blocks, block_size * head_dim], so that one row gather yields a batch of [keys,
head_dim] matrices for a batched product without another copy.
"""

from __future__ import annotations

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
    from jaxtyping import Int

_SHARED_ROWS = 32  # rows of one sequence and width from which they share one gather
_MAX_ELEMENTS = 1 << 22  # keys gathered or scores made in one product


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [start, stop) attend over `width` keys; `gather` picks cache rows (of one sequence if is_shared)."""

    start: int
    stop: int
    width: int
    is_shared: bool
    gather: Tensor  # int64, rows of the flattened [kv_heads * blocks] dim
    bias: Tensor  # [rows, width], 0 or -inf


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of one forward pass write, and what they read."""

    write: Tensor  # int64 [kv_heads * rows], positions in the flattened [kv_heads * blocks * block_size] dim
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
        shape = (config.num_layers, config.num_kv_heads, num_blocks, block_size * config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.widths = key_widths(block_size, max_len)
        self._heads = torch.arange(config.num_kv_heads).unsqueeze(1)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole blocks in all layers: what a fork does with its half-full last block."""
        src, dst = torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device)
        self.keys.index_copy_(2, dst, self.keys.index_select(2, src))
        self.values.index_copy_(2, dst, self.values.index_select(2, src))

    def width_index(self, positions: Int[np.ndarray, " rows"]) -> np.ndarray:
        """Which of `widths` a query at each position uses; rows are sorted by it before `layout`."""
        return np.searchsorted(self.widths, positions + 1)

    def layout(
        self, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"], tables: Int[np.ndarray, "slots blocks"],
        width_index: Int[np.ndarray, " rows"],
    ) -> Layout:  # fmt: skip
        """Row i is token `positions[i]` of slot `owners[i]`; rows are sorted by width_index; owner -1 is padding."""
        bs = self.block_size
        block = np.where(owners >= 0, tables[owners, positions // bs], 0)
        write = torch.from_numpy(block * bs + positions % bs)
        write = (write.unsqueeze(0) + self._heads * (self.num_blocks * bs)).reshape(-1).to(self.device)
        cuts = np.flatnonzero(np.diff(width_index)) + 1
        parts: list[_Part] = []
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(owners)]):
            self._cut_width(
                parts, start, stop, owners, positions, tables, int(self.widths[width_index[start]])
            )
        return Layout(write, tuple(parts))

    def _cut_width(self, parts, start, stop, owners, positions, tables, width) -> None:
        """Cut rows of one width into long runs of one sequence and chunks of everything else."""
        pending = start
        owner = owners[start:stop]
        if stop - start >= _SHARED_ROWS:
            cuts = np.flatnonzero(np.diff(owner)) + 1 + start
            for low, high in zip([start, *cuts.tolist()], [*cuts.tolist(), stop]):
                if high - low >= _SHARED_ROWS and owners[low] >= 0:
                    self._add_parts(parts, pending, low, owners, positions, tables, width, False)
                    self._add_parts(parts, low, high, owners, positions, tables, width, True)
                    pending = high
        self._add_parts(parts, pending, stop, owners, positions, tables, width, False)

    def _add_parts(self, parts, start, stop, owners, positions, tables, width, is_shared) -> None:
        per_row = width * (self.group * self.num_kv_heads if is_shared else self.num_kv_heads * self.head_dim)
        step = max(_MAX_ELEMENTS // per_row, 16)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            rows = owners[low : low + 1] if is_shared else owners[low:high]
            num_blocks = width // self.block_size
            table = tables[rows, :num_blocks]
            if table.shape[1] < num_blocks:
                table = np.pad(table, ((0, 0), (0, num_blocks - table.shape[1])))
            if rows[-1] < 0:
                table = np.where(rows[:, None] >= 0, table, 0)
            gather = torch.from_numpy(np.ascontiguousarray(table).reshape(-1)).unsqueeze(0)
            gather = (gather + self._heads * self.num_blocks).reshape(-1).to(self.device)
            is_hidden = np.arange(width)[None, :] > positions[low:high, None]
            bias = torch.from_numpy(np.where(is_hidden, np.float32(-np.inf), np.float32(0)))
            parts.append(
                _Part(low, high, width, is_shared, gather, bias.to(device=self.device, dtype=self.keys.dtype))
            )

    def attend(self, layout: Layout) -> Attend:
        """The attention of one forward pass: writes the rows' keys and values, then reads what each may see."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows, heads, dim = q.shape
            keys, values = self.keys[layer], self.values[layer]
            keys.view(-1, dim).index_copy_(0, layout.write, k.transpose(0, 1).reshape(-1, dim))
            values.view(-1, dim).index_copy_(0, layout.write, v.transpose(0, 1).reshape(-1, dim))
            keys, values = keys.view(-1, self.block_size * dim), values.view(-1, self.block_size * dim)
            q = q.view(rows, self.num_kv_heads, self.group, dim).transpose(0, 1)  # [kv_heads, rows, group, dim]
            read = self._read_exactly if self.is_exact else self._read
            out = [read(q, keys, values, part) for part in layout.parts]
            merged = out[0] if len(out) == 1 else torch.cat(out, dim=1)
            return merged.transpose(0, 1).reshape(rows, heads, dim)

        return attend

    def _read_exactly(self, q: Tensor, keys: Tensor, values: Tensor, part: _Part) -> Tensor:
        """Softmax attention as one [group, dim] product a row, so that no row sees the batch's shape."""
        kv_heads, group, dim = self.num_kv_heads, self.group, self.head_dim
        rows = part.stop - part.start
        q = q[:, part.start : part.stop] * self.scale
        k = keys.index_select(0, part.gather)
        v = values.index_select(0, part.gather)
        if not part.is_shared:
            k, v = k.view(kv_heads * rows, part.width, dim), v.view(kv_heads * rows, part.width, dim)
            scores = torch.bmm(q.reshape(kv_heads * rows, group, dim), k.transpose(1, 2))
            scores.view(kv_heads, rows, group, part.width).add_(part.bias.unsqueeze(1))
            return torch.bmm(torch.softmax(scores, dim=-1), v).view(kv_heads, rows, group, dim)
        k, v = k.view(kv_heads, part.width, dim), v.view(kv_heads, part.width, dim)
        out = []
        for head in range(kv_heads):
            # Every row multiplies the same keys; they are not copied (stride 0).
            scores = torch.bmm(q[head], k[head].expand(rows, -1, -1).transpose(1, 2))
            scores.add_(part.bias.unsqueeze(1))
            out.append(torch.bmm(torch.softmax(scores, dim=-1), v[head].expand(rows, -1, -1)))
        return torch.stack(out)

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, part: _Part) -> Tensor:
        """The library's fused attention, as in the trainer: scores stay in float32 whatever the dtype."""
        kv_heads, group, dim = self.num_kv_heads, self.group, self.head_dim
        rows = part.stop - part.start
        q = q[:, part.start : part.stop]
        k = keys.index_select(0, part.gather).view(kv_heads, -1, part.width, dim)
        v = values.index_select(0, part.gather).view(kv_heads, -1, part.width, dim)
        attend = partial(F.scaled_dot_product_attention, scale=self.scale, enable_gqa=True)
        if part.is_shared:
            q = q.transpose(1, 2).reshape(1, kv_heads * group, rows, dim)
            out = attend(q, k.transpose(0, 1), v.transpose(0, 1), attn_mask=part.bias)
            return out.view(kv_heads, group, rows, dim).transpose(1, 2)
        q = q.transpose(0, 1).reshape(rows, kv_heads * group, 1, dim)
        mask = part.bias.view(rows, 1, 1, part.width)
        out = attend(q, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask)
        return out.reshape(rows, kv_heads, group, dim).transpose(0, 1)
