"""Where the documents of a packed row begin and end, for mixers with a state: the state starts anew in each.

A recurrent mixer computes chunks of tokens at once and passes its state from chunk to chunk. `Chunks` says which tokens
are in which chunk: no chunk has tokens of two documents, and chunks that are equally far from the beginning of their
document are computed together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

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

    def split(self, x: Shaped[Tensor, "tokens ..."]) -> Shaped[Tensor, "chunks size ..."]:
        """Tokens by chunk; padding is 0."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        return padded.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def join(self, x: Shaped[Tensor, "chunks size ..."]) -> Shaped[Tensor, "tokens ..."]:
        """The reverse of `split`."""
        return x.flatten(0, 1).index_select(0, self.places)

    def scan(
        self,
        state: Float[Tensor, "documents ..."],
        step: Step,
    ) -> Float[Tensor, "chunks ..."]:
        """Results of all chunks, in order."""
        results, start = [], 0
        for count in self.num_documents:
            state, out = step(slice(start, start + count), state[:count])
            results.append(out)
            start += count
        return torch.cat(results)


@dataclass(frozen=True)
class Documents:
    """The documents of a row: document d is tokens bounds[d]:bounds[d + 1]."""

    bounds: Sequence[int]
    device: torch.device
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
        size = min(MAX_CHUNK, -(-int(lengths.max()) // 16) * 16)
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
        rows = np.where(is_real, rows, num_tokens)
        return Chunks(
            torch.from_numpy(rows).to(self.device), torch.from_numpy(places).to(self.device), num_documents
        )

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
        """The row with `gap` places of zeros before each document; and the result that each token has."""
        num_tokens, num_documents = int(self.bounds[-1]), len(self.lengths)
        places = np.arange(num_tokens) + gap * (1 + np.repeat(np.arange(num_documents), self.lengths))
        rows = np.full(max(num_tokens + gap * num_documents, gap + 1), num_tokens)
        rows[places] = np.arange(num_tokens)
        return torch.from_numpy(rows).to(self.device), torch.from_numpy(places - gap).to(self.device)


class CausalConvolution(nn.Module):
    """A causal convolution of every channel with its own few weights; the weights of a Conv1d."""

    def __init__(self, channels: int, width: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if has_bias else None

    def forward(
        self, x: Float[Tensor, "tokens channels"], documents: Documents
    ) -> Float[Tensor, "tokens channels"]:
        return documents.convolve(x, self.weight, self.bias)


def pairwise_decay(since_start: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size size"]:
    """exp(since_start[i] - since_start[j]) for j <= i, what is left at i of token j; 0 above the diagonal."""
    size = since_start.shape[-1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=since_start.device).triu(1)
    difference = since_start.unsqueeze(-1) - since_start.unsqueeze(-2)
    return difference.masked_fill(is_later, float("-inf")).exp()
