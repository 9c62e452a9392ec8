"""Maps the trained tokens of a micro batch to their samples: sums per sample, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped


@dataclass(frozen=True)
class SampleIndex:
    """The document of each token. Tokens are in document order; a document may have no tokens."""

    lengths: Int[Tensor, " documents"]
    index: Int[Tensor, " tokens"]
    """Index of the document of each token."""

    @classmethod
    def of(cls, lengths: Int[Tensor, " documents"]) -> SampleIndex:
        """From the number of tokens of each document."""
        documents = torch.arange(len(lengths), device=lengths.device)
        return cls(lengths, torch.repeat_interleave(documents, lengths))

    def sum(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " documents"]:
        """Sum per document; 0 without tokens. Unlike index_add, deterministic on a GPU."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0)

    def mean(self, values: Float[Tensor, " tokens"], is_member: Bool[Tensor, " tokens"]) -> Float[Tensor, " documents"]:
        """Mean per document over members only; 0 without members."""
        return self.sum(values.masked_fill(~is_member, 0.0)) / self.count(is_member).clamp(min=1)

    def count(self, is_member: Bool[Tensor, " tokens"]) -> Float[Tensor, " documents"]:
        """Number of members of each document, as float32 to divide by."""
        return self.sum(is_member.float())

    def spread(self, values: Shaped[Tensor, " documents"]) -> Shaped[Tensor, " tokens"]:
        """Give each token the value of its document; gradients add up in a fixed order."""
        return values[self.index]
