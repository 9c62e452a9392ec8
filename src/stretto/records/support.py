"""The support of each position: the tokens that top_p, top_k and min_p left to sample from.

An engine's log-probabilities are those of the distribution over the support only; a trainer that takes the softmax
over the same tokens (models/lm_head.py) trains the distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class Support(msgspec.Struct, frozen=True):
    """Token ids of the supports of several positions, one after another.

    Within a position they are in any order. A position of size 0 has all tokens: nothing was cut there, or nothing was
    sampled.
    """

    ids: np.ndarray  # int32 [sum of sizes]
    sizes: np.ndarray  # int32 [tokens]

    @classmethod
    def of(cls, parts: Iterable[Sequence[int] | Int[np.ndarray, " support"]]) -> Support:
        """Build a support from the token ids of each position."""
        arrays = [np.asarray(part, np.int32) for part in parts]
        ids = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        return cls(ids, np.array([len(array) for array in arrays], np.int32))

    @classmethod
    def unrestricted(cls, num_tokens: int) -> Support:
        """The support of num_tokens positions with all tokens at each."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens, np.int32))

    def __len__(self) -> int:
        return len(self.sizes)

    def lists(self) -> list[list[int]]:
        """The token ids of each position."""
        ends = np.cumsum(self.sizes).tolist()
        ids = self.ids.tolist()
        return [ids[low:high] for low, high in zip([0, *ends], ends)]

    def part(self, start: int, stop: int) -> Support:
        """The support of positions start <= t < stop."""
        low = int(self.sizes[:start].sum())
        return Support(self.ids[low : low + int(self.sizes[start:stop].sum())], self.sizes[start:stop])

    def at(self, positions: Int[np.ndarray, " positions"]) -> Support:
        """The support of these positions, in this order."""
        sizes = self.sizes[positions]
        starts = (np.cumsum(self.sizes, dtype=np.int64) - self.sizes)[positions]
        before = np.cumsum(sizes, dtype=np.int64) - sizes
        index = np.repeat(starts - before, sizes) + np.arange(sizes.sum(dtype=np.int64))
        return Support(self.ids[index], sizes)

    def where(self, mask: Bool[np.ndarray, " tokens"]) -> Support:
        """The same positions, with all tokens where the mask is false."""
        sizes = np.where(mask, self.sizes, 0).astype(np.int32)
        return Support(self.ids[np.repeat(mask, self.sizes)], sizes)


def concat_supports(parts: Sequence[Support | None], lengths: Sequence[int]) -> Support | None:
    """Concatenate supports of `lengths` positions; None if all are None, which is unrestricted."""
    if all(part is None for part in parts):
        return None
    whole = [
        Support.unrestricted(length) if part is None else part for part, length in zip(parts, lengths, strict=True)
    ]
    return Support(np.concatenate([part.ids for part in whole]), np.concatenate([part.sizes for part in whole]))
