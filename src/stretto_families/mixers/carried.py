"""States of recurrent mixers between an engine's passes: sequences continue from them.

In place of `Documents` a pass over some rows of several sequences has `CarriedDocuments`. Mixers compute as in
training, from the states of the pass before: prompts may be read in pieces, and tokens decoded one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from stretto_families.mixers.documents import ALL_HEADS, CarriedState, Chunks, ChunkTable, Documents, chunk_size

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class LayerStates:
    """The state that the mixer of one layer keeps of each sequence.

    recent: [places, width - 1, channels], the latest inputs of its convolution. state: [places, ...], float32.
    """

    recent: Tensor
    state: Tensor

    @property
    def tensors(self) -> tuple[Float[Tensor, "places recent channels"], Float[Tensor, "places ..."]]:
        return self.recent, self.state


class CausalConvolution(nn.Module):
    """A causal convolution of every channel with its own few weights; the weights of a Conv1d."""

    def __init__(self, channels: int, width: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if has_bias else None

    def forward(
        self,
        x: Float[Tensor, "tokens channels"],
        documents: Documents | CarriedDocuments,
        parts: Sequence[int] | None = None,
    ) -> Float[Tensor, "tokens channels"]:
        """parts: sizes of the parts of the channels, if a rank may have those of some heads only."""
        weight = self.weight if parts is None else documents.heads.own(self.weight, parts)
        return documents.convolve(x, weight, self.bias)

    def new_states(self, places: int, state: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerStates:
        """Empty states for `places` sequences: latest inputs, and a state of this shape."""
        channels, _, width = self.weight.shape
        recent = torch.zeros(places, width - 1, channels, dtype=dtype, device=device)
        return LayerStates(recent, torch.zeros(places, *state, device=device))


class CarriedRows:
    """The rows of a pass by sequence.

    Row i belongs to the sequence at places[i] of `LayerStates` (0: padding). The rows of a sequence are in the order
    of its tokens, but others may be between them.
    """

    def __init__(self, places: Int[np.ndarray, " rows"], device: torch.device, *, is_stepwise: bool) -> None:
        """is_stepwise: chunks are single tokens, so that bits do not depend on how a prompt was cut."""
        self.device, self.num_rows = device, len(places)
        # Rows of padding are sequences of one token, which all have place 0.
        keys = np.where(places > 0, places, -1 - np.arange(len(places)))
        self.order = np.argsort(keys, kind="stable")
        unique, self.lengths = np.unique(keys, return_counts=True)
        self.places = np.maximum(unique, 0)
        longest = int(self.lengths.max())
        self.size = 1 if is_stepwise or longest == 1 else chunk_size(longest)
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}

    @functools.cached_property
    def chunks(self) -> tuple[Chunks, Int[Tensor, " documents"]]:
        """The chunks, and the place in `LayerStates` of each document."""
        table = ChunkTable.of(self.lengths, self.size)
        rows = np.append(self.order, self.num_rows)[table.rows]
        places = np.empty_like(table.places)
        places[self.order] = table.places
        return Chunks(self._to(rows), self._to(places), table.num_documents), self._to(self.places[table.order])

    def taps(self, width: int) -> tuple[Int[Tensor, "width rows"], Int[Tensor, "documents recent"]]:
        """Indices into the latest inputs of all documents followed by all rows.

        First the inputs of each row, in the order of the weights; then the latest inputs after the pass.
        """
        if width not in self._taps:
            self._taps[width] = self._find_taps(width)
        return self._taps[width]

    def _find_taps(self, width: int) -> tuple[Tensor, Tensor]:
        gap, num = width - 1, len(self.lengths)
        document = np.repeat(np.arange(num), self.lengths)
        first = np.cumsum(self.lengths) - self.lengths
        nth = np.arange(self.num_rows) - first[document]

        def find(document: np.ndarray, nth: np.ndarray) -> np.ndarray:
            """The input number `nth` of a document in this pass; below 0 are those of the passes before."""
            rows = self.order[np.clip(first[document] + nth, 0, self.num_rows - 1)]
            return np.where(nth < 0, (document + 1) * gap + nth, num * gap + rows)

        taps = np.empty((width, self.num_rows), np.int64)
        taps[:, self.order] = find(document[None], nth[None] - np.arange(gap, -1, -1)[:, None])
        latest = find(np.arange(num)[:, None], self.lengths[:, None] - np.arange(gap, 0, -1)[None])
        return self._to(taps), self._to(latest)

    @functools.cached_property
    def documents(self) -> Int[Tensor, " documents"]:
        """The place of each document, in the order of `lengths`."""
        return self._to(self.places)

    def _to(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.device)


@dataclass(frozen=True)
class CarriedDocuments:
    """The rows of a pass with the states of one layer's mixer; `at` chooses the layer."""

    rows: CarriedRows
    layers: Mapping[int, LayerStates]
    layer: int | None = None
    heads = ALL_HEADS

    def at(self, layer: int) -> CarriedDocuments:
        """The same rows for the mixer of this layer."""
        return replace(self, layer=layer)

    @property
    def states(self) -> LayerStates:
        assert self.layer is not None, "a layer is chosen first"
        return self.layers[self.layer]

    @property
    def chunks(self) -> Chunks:
        chunks, places = self.rows.chunks
        return replace(chunks, carried=CarriedState(self.states.state, places))

    def convolve(
        self,
        x: Float[Tensor, "tokens channels"],
        weight: Float[Tensor, "channels one width"],
        bias: Float[Tensor, " channels"] | None,
    ) -> Float[Tensor, "tokens channels"]:
        """Causal convolution of each channel, from the latest inputs of the passes before.

        Every tap is a product and a sum of its own, so that bits do not depend on the number of rows.
        """
        recent, documents = self.states.recent, self.rows.documents
        taps, latest = self.rows.taps(weight.shape[-1])
        inputs = torch.cat((recent.index_select(0, documents).flatten(0, 1), x))
        recent.index_copy_(0, documents, inputs.index_select(0, latest.flatten()).unflatten(0, latest.shape))
        out = None
        for rows, factors in zip(taps, weight[:, 0].T.float()):
            product = inputs.index_select(0, rows).float() * factors
            out = product if out is None else out + product
        assert out is not None, "a convolution has taps"
        return (out if bias is None else out + bias.float()).to(x.dtype)
