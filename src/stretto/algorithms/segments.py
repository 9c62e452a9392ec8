"""The documents of a micro batch, as seen from its trained tokens: sums over them, and back to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Segments:
    """Tokens stand in document order; a document may have none of them."""

    lengths: Int[Tensor, " documents"]
    index: Int[Tensor, " tokens"]
    """The document of each token."""

    @classmethod
    def of(cls, lengths: Int[Tensor, " documents"]) -> Segments:
        documents = torch.arange(len(lengths), device=lengths.device)
        return cls(lengths, torch.repeat_interleave(documents, lengths))

    def sum(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " documents"]:
        """0 for a document without tokens. Unlike index_add it gives the same bits each time on a GPU."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0)

    def mean(
        self, values: Float[Tensor, " tokens"], is_member: Bool[Tensor, " tokens"]
    ) -> Float[Tensor, " documents"]:
        """Mean over members only; 0 for a document without members."""
        return self.sum(values.masked_fill(~is_member, 0.0)) / self.count(is_member).clamp(min=1)

    def count(self, is_member: Bool[Tensor, " tokens"]) -> Float[Tensor, " documents"]:
        """Members of each document, as a float32 so that it divides."""
        return self.sum(is_member.float())

    def spread(self, values: Float[Tensor, " documents"]) -> Float[Tensor, " tokens"]:
        """Every token's document's value; gradients add up in a fixed order."""
        return values[self.index]
