"""The documents of a packed row, for recurrent mixers.

The state starts anew in each document. A recurrent mixer computes chunks of tokens at once and passes its state from
chunk to chunk. `Chunks` says which tokens are in which chunk: no chunk has tokens of two documents, and chunks that
are equally far from the beginning of their document are computed together. An engine's sequences, whose states go on
from pass to pass, are in carried.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

    from stretto.models.parts.attend import Heads
    from stretto.models.segments import SegmentTree

MAX_CHUNK = 64
"""Tokens per chunk; fewer if all documents are shorter."""


Step = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""(chunks, states [chunks, ...] before them) -> (states after them, results [chunks, ...])."""


@dataclass(frozen=True)
class Chunks:
    """The tokens of a row in chunks of equal size, padded at the end of each document.

    Chunks are ordered by their number within the document, then by length of the document, longest first. So the
    chunks of step s are contiguous, and their documents are the first `num_documents[s]` of those of step 0.
    """

    rows: Int[Tensor, "chunks size"]
    """The token at each place; padding has the index one after the last token."""
    places: Int[Tensor, " tokens"]
    """The place of each token, in rows.flatten()."""
    num_documents: tuple[int, ...]
    """Chunks per step."""
    carried: CarriedState | None = None
    """The states before the first chunks, replaced by those after the last chunks; None: states begin at 0."""

    def split(self, x: Shaped[Tensor, "tokens ..."]) -> Shaped[Tensor, "chunks size ..."]:
        """Tokens by chunk; padding is 0."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        return padded.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def join(self, x: Shaped[Tensor, "chunks size ..."]) -> Shaped[Tensor, "tokens ..."]:
        """The reverse of `split`."""
        return x.flatten(0, 1).index_select(0, self.places)

    def scan(
        self, like: Float[Tensor, "tokens ..."], shape: tuple[int, ...], step: Step
    ) -> Float[Tensor, "chunks ..."]:
        """Results of all chunks, in order; states have this shape and the dtype of `like`."""
        counts, carried = self.num_documents, self.carried
        state = like.new_zeros(counts[0], *shape) if carried is None else carried.load()
        results, ended, start = [], [], 0
        for count, following in zip(counts, (*counts[1:], 0)):
            state, out = step(slice(start, start + count), state)
            results.append(out)
            ended.append(state[following:])
            state = state[:following]
            start += count
        if carried is not None:
            carried.store(torch.cat(ended[::-1]))
        return torch.cat(results)


@dataclass(frozen=True)
class CarriedState:
    """The states of a pass's documents: document d, longest first, has places[d] of `states`."""

    states: Float[Tensor, "places ..."]
    places: Int[Tensor, " documents"]

    def load(self) -> Float[Tensor, "documents ..."]:
        return self.states.index_select(0, self.places)

    def store(self, states: Float[Tensor, "documents ..."]) -> None:
        self.states.index_copy_(0, self.places, states)


@dataclass(frozen=True)
class ChunkTable:
    """Where the tokens of documents are in chunks; fields as those of `Chunks`, but as arrays."""

    rows: Int[np.ndarray, "chunks size"]
    places: Int[np.ndarray, " tokens"]
    num_documents: tuple[int, ...]
    order: Int[np.ndarray, " documents"]
    """The documents, longest first."""

    @classmethod
    def of(cls, lengths: Int[np.ndarray, " documents"], size: int) -> ChunkTable:
        """The table for documents that follow each other; none is empty."""
        num_tokens = int(lengths.sum())
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(-lengths, kind="stable")
        lengths, starts = lengths[order], starts[order]
        counts = -(-lengths // size)
        # Steps over documents: the first num_documents[s] documents have a chunk of number s.
        num_documents = tuple(int((counts > step).sum()) for step in range(int(counts[0])))
        first = np.concatenate([starts[:n] + step * size for step, n in enumerate(num_documents)])
        end = np.concatenate([(starts + lengths)[:n] for n in num_documents])
        rows = first[:, None] + np.arange(size)
        is_real = rows < end[:, None]
        places = np.empty(num_tokens, np.int64)
        places[rows[is_real]] = np.flatnonzero(is_real)
        return cls(np.where(is_real, rows, num_tokens), places, num_documents, order)


def documents_of(tree: SegmentTree, device: torch.device, heads: Heads | None = None) -> Documents:
    """The documents of a packed row, the same for all passes over it."""
    key = (Documents, device, heads)
    if key not in tree.tables:
        tree.tables[key] = Documents(tree.bounds, device, heads or ALL_HEADS)
    found: Documents = tree.tables[key]
    return found


def chunk_size(longest: int) -> int:
    """Tokens per chunk for documents of at most this length."""
    return min(MAX_CHUNK, -(-longest // 16) * 16)


class AllHeads:
    """The `Heads` of a rank with all tokens and heads."""

    degree = 1

    def spread(self, x: Float[Tensor, "own channels"], parts: Sequence[int]) -> Float[Tensor, "own channels"]:
        return x

    def collect(self, x: Float[Tensor, "own heads dim"]) -> Float[Tensor, "own heads dim"]:
        return x

    def own(self, weight: Float[Tensor, "channels ..."], parts: Sequence[int]) -> Float[Tensor, "channels ..."]:
        return weight


ALL_HEADS = AllHeads()


@dataclass(frozen=True)
class Documents:
    """The documents of a row: document d is tokens bounds[d]:bounds[d + 1]."""

    bounds: Sequence[int] | Int[np.ndarray, " bounds"]
    device: torch.device
    heads: Heads = ALL_HEADS
    """Who computes which heads: with context parallelism ranks exchange them."""
    _convolution_rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, " documents"]:
        """Tokens per document, without empty ones."""
        lengths = np.diff(np.asarray(self.bounds, np.int64))
        return lengths[lengths > 0]

    @functools.cached_property
    def chunks(self) -> Chunks:
        lengths, num_tokens = self.lengths, int(self.bounds[-1])
        if not num_tokens:
            empty = torch.zeros(0, dtype=torch.long, device=self.device)
            return Chunks(empty.view(0, 1), empty, (0,))
        table = ChunkTable.of(lengths, chunk_size(int(lengths.max())))
        rows, places = (torch.from_numpy(x).to(self.device) for x in (table.rows, table.places))
        return Chunks(rows, places, table.num_documents)

    def at(self, layer: int) -> Documents:
        """The same for every layer, because nothing is carried from pass to pass."""
        return self

    def convolve(
        self,
        x: Float[Tensor, "tokens channels"],
        weight: Float[Tensor, "channels one width"],
        bias: Float[Tensor, " channels"] | None,
    ) -> Float[Tensor, "tokens channels"]:
        """Causal convolution of each channel over its document; tokens before a document count as 0."""
        width = weight.shape[-1]
        if width not in self._convolution_rows:
            self._convolution_rows[width] = self._pad_rows(width - 1)
        rows, ends = self._convolution_rows[width]
        padded = torch.cat((x, x.new_zeros(1, x.shape[1]))).index_select(0, rows)
        out = F.conv1d(padded.T.unsqueeze(0), weight, bias, groups=weight.shape[0])
        return out.squeeze(0).T.index_select(0, ends)

    def _pad_rows(self, gap: int) -> tuple[Tensor, Tensor]:
        """Indices of the row with `gap` zeros before each document; and of each token's result."""
        num_tokens, num_documents = int(self.bounds[-1]), len(self.lengths)
        places = np.arange(num_tokens) + gap * (1 + np.repeat(np.arange(num_documents), self.lengths))
        rows = np.full(max(num_tokens + gap * num_documents, gap + 1), num_tokens)
        rows[places] = np.arange(num_tokens)
        return torch.from_numpy(rows).to(self.device), torch.from_numpy(places - gap).to(self.device)


def decays_since_start(log_decay: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
    """Sums of the logarithms up to each token, in float64.

    Later only differences of two sums are used, which can be thousands of times smaller than the sums; so can their
    gradients.
    """
    return log_decay.double().cumsum(-1)


def pairwise_decay(since_start: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size size"]:
    """exp(since_start[i] - since_start[j]) for j <= i, the decay from token j to i; else 0."""
    size = since_start.shape[-1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=since_start.device).triu(1)
    difference = (since_start.unsqueeze(-1) - since_start.unsqueeze(-2)).float()
    return difference.masked_fill(is_later, float("-inf")).exp()
