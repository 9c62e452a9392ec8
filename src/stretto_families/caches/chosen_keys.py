"""The cache of models that choose the keys they attend to: a small vector and an indexer's key per token.

Blocks, prefixes and rows are those of kv_cache.py; only the content of blocks differs. A layer with an indexer scores
the cached keys of a row's sequence, chooses the best, and attends to their vectors; layers that share its choice attend
to the same tokens. key_choice.py defines the choice, and the order among equal scores.

Bits: a row reads keys padded to a width that depends on its own position, as in kv_cache.py, and every product is one
per row, so a row has equal bits in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.families.shape import ModelConfig
from stretto.inference.embedded.caches.kv_cache import BlockPart, KVCache, PassLayout, PassRows, key_widths
from stretto.inference.embedded.caches.running import RunningKV
from stretto.models.parts.attend import Attend, Limits
from stretto_families.mixers.key_choice import HIDDEN, NOT_A_KEY, KeyChoice, attend_rows, key_numbers, rank_codes
from stretto_families.shapes import IndexerShape, LatentShape

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int32, Int64

_MAX_ELEMENTS = 1 << 22  # elements of the keys or scores of one product


@dataclass(frozen=True, slots=True)
class _Part(BlockPart):
    """Rows that read `width` keys; if `places` has one row, all are of one sequence.

    places: where their sequences' tokens are in the cache. is_hidden: True for tokens after the row's own.
    """

    places: Int64[Tensor, "sequences width"]
    is_hidden: Bool[Tensor, "rows width"]


class ChosenKeyCache(KVCache):
    """Small vectors [layers, tokens, rank + rotated_dim], and keys of indexers [indexers, tokens, head_dim]."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, max_len: int, *, dtype: torch.dtype,
        device: torch.device, is_exact: bool, slab_tokens: int = 0,
    ) -> None:  # fmt: skip
        """slab_tokens: ignored, because sequences that are being decoded are read from their blocks too."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.is_exact, self.device = is_exact, device
        self.widths = key_widths(block_size, max_len)
        latent, indexer, self._sources = _shape_of(config)
        self._rank, self._num_index_heads = latent.rank, indexer.num_heads
        num_tokens = num_blocks * block_size
        zeros = lambda *sizes: torch.zeros(*sizes, dtype=dtype, device=device)
        self.small = zeros(config.num_layers, num_tokens, latent.rank + latent.rotated_dim)
        self.index = zeros(len(self._sources), num_tokens, indexer.head_dim)
        self.running = RunningKV(config, self.widths, max_tokens=0, dtype=dtype, device=device, is_exact=is_exact)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        latent, indexer, sources = _shape_of(config)
        numbers = config.num_layers * (latent.rank + latent.rotated_dim)
        return (numbers + len(sources) * indexer.head_dim) * dtype.itemsize

    def copy_blocks(self, source: Int64[np.ndarray, " blocks"], target: Int64[np.ndarray, " blocks"]) -> None:
        src, dst = torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device)
        for cache in (self.small, self.index):
            blocks = cache.unflatten(1, (self.num_blocks, self.block_size))
            blocks.index_copy_(1, dst, blocks.index_select(1, src))

    def layout(self, rows: PassRows) -> PassLayout:
        layout = PassLayout(rows, torch.empty(0), [])
        self.advance(layout)
        cuts = (np.flatnonzero(np.diff(rows.width_index)) + 1).tolist()
        for start, stop in zip([0, *cuts], [*cuts, len(rows.owners)]):
            width = int(self.widths[rows.width_index[start]])
            layout.parts += self._cut_width(rows, start, stop, width)
        return layout

    def _chunks(self, rows: PassRows, start: int, stop: int, width: int, *, is_shared: bool) -> Iterator[BlockPart]:
        vector = max(self.small.shape[-1], self.index.shape[-1], self._num_index_heads)
        step = max(_MAX_ELEMENTS // (width * vector), 1)
        numbers, size = np.arange(width), self.block_size
        for low in range(start, stop, step):
            high = min(low + step, stop)
            owners = rows.owners[low : low + 1 if is_shared else high]
            block = rows.tables[owners][:, np.minimum(numbers // size, rows.tables.shape[1] - 1)]
            places = np.where(owners[:, None] >= 0, block * size + numbers % size, 0)
            is_hidden = numbers > rows.positions[low:high, None]
            to = lambda values: torch.from_numpy(values).to(self.device)
            yield _Part(low, high, to(places), to(is_hidden))

    def attend(self, layout: PassLayout) -> Attend:
        """The attention function of one pass; choices are kept for the layers that share them."""
        chosen: dict[tuple[int, int], Tensor] = {}
        parts = [part for part in layout.parts if isinstance(part, _Part)]
        assert len(parts) == len(layout.parts)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits) -> Tensor:
            choice = limits.keys
            assert isinstance(choice, KeyChoice), "every layer chooses its keys"
            self.small[layer].index_copy_(0, layout.write, k.squeeze(1))
            vectors = choice.vectors
            if vectors is not None:
                self.index[self._sources[layer]].index_copy_(0, layout.write, vectors.keys)
            out = []
            for part in parts:
                rows, key = slice(part.start, part.stop), (choice.source, part.start)
                if vectors is not None:
                    queries, weights = vectors.queries[rows], vectors.weights[rows]
                    chosen[key] = self._choose(part, self._sources[layer], queries, weights, choice.top_k)
                out.append(self._read(layer, q[rows], chosen[key], choice.scale))
            return out[0] if len(out) == 1 else torch.cat(out)

        return attend

    def _choose(
        self,
        part: _Part,
        source: int,
        queries: Float[Tensor, "rows heads dim"],
        weights: Float[Tensor, "rows heads"],
        top_k: int,
    ) -> Int32[Tensor, "rows chosen"]:
        """Where the chosen tokens of each row are in the cache, in order of position; NOT_A_KEY comes first."""
        width = part.places.shape[1]
        places = part.places.expand(len(queries), -1)
        if width <= top_k:  # all that a row sees
            return places.masked_fill(part.is_hidden, NOT_A_KEY).int()
        keys = self.index[source].index_select(0, part.places.flatten()).unflatten(0, part.places.shape)
        keys = keys.float().transpose(1, 2).expand(len(queries), -1, -1)
        score = lambda q, w, k: torch.bmm(w, torch.bmm(q, k).relu_())
        scores = _by_row(score, queries.float(), weights.unsqueeze(1), keys)
        codes = rank_codes(scores.squeeze(1), torch.arange(width, device=self.device))
        best = codes.masked_fill(part.is_hidden, HIDDEN).topk(top_k, dim=1, sorted=False).values
        numbers = key_numbers(best).masked_fill(best == HIDDEN, NOT_A_KEY).sort(dim=1).values
        chosen = places.gather(1, numbers.clamp_min(0))
        return chosen.masked_fill(numbers == NOT_A_KEY, NOT_A_KEY).int()

    def _read(  # type: ignore[override]
        self, layer: int, q: Float[Tensor, "rows heads dim"], chosen: Tensor, scale: float
    ) -> Float[Tensor, "rows heads rank"]:
        def read(q: Tensor, chosen: Tensor) -> Tensor:
            keys, weights, _ = attend_rows(q, self.small[layer], chosen, scale)
            return weights @ keys[..., : self._rank]

        return _by_row(read, q, chosen)


def _by_row(compute, *parts: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """compute(*parts) with at least two rows, because BLAS has another kernel for one row."""
    if len(parts[0]) > 1:
        return compute(*parts)
    return compute(*(part.expand(2, *part.shape[1:]) for part in parts))[:1]


def _shape_of(config: ModelConfig) -> tuple[LatentShape, IndexerShape, dict[int, int]]:
    """The shapes of small vectors and indexers, and the index of each layer among those with an indexer."""
    latent: LatentShape = config.shape_of("latent")
    assert latent.indexer is not None
    return latent, latent.indexer, {layer: n for n, layer in enumerate(sorted(set(latent.indexer.sources)))}
