"""Images beside tokens: pixel patches, and their positions in a token sequence.

An image takes as many tokens as the model makes of its patches; all of them are the same token, the placeholder. A
sequence lists its images in the order of their placeholders. chat/patches.py makes the patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float32, Int


class Image(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """One image as a vision tower takes it; two with the same hash are equal.

    Sequences that show the same image share one array of patches, which a message holds once (codec.py). Patches are
    None where only the name is known: the ledger keeps them once for all rollouts that refer to the hash.
    """

    hash: str  # `image_hash` of patches and grid
    grid: tuple[int, int, int]  # patches along time, height and width
    # float32 [t * h * w, channels * temporal_patch * patch * patch], in the order of transformers' pixel_values.
    patches: np.ndarray | None = None

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def num_tokens(self, merge_size: int) -> int:
        """Placeholders of this image, for a model that merges merge_size x merge_size patches to a token."""
        return self.num_patches // merge_size**2

    def without_patches(self) -> Image:
        """The image by its hash and grid alone."""
        return self if self.patches is None else Image(self.hash, self.grid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def image_of(patches: Float32[np.ndarray, "patches dim"], grid: tuple[int, int, int]) -> Image:
    """The image of these patches, which must not change any more."""
    return Image(image_hash(patches, grid), grid, patches)


def image_hash(patches: Float32[np.ndarray, "patches dim"], grid: tuple[int, int, int]) -> str:
    """Blake2b of patches and grid as 32 hexadecimal digits."""
    digest = hashlib.blake2b(np.ascontiguousarray(patches, np.float32).data, digest_size=16)
    digest.update(np.asarray(grid, np.int64).tobytes())
    return digest.hexdigest()


def placeholder_spans(
    token_ids: Int[np.ndarray, " tokens"], image_token_id: int, counts: Iterable[int]
) -> list[tuple[int, int]] | None:
    """Start and end of the placeholders of each image; counts: placeholders by image, in order.

    None if the placeholders in the sequence are not those of these images. The placeholders of one image are
    consecutive; those of two images may follow each other without a gap.
    """
    at = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    spans, used = [], 0
    for count in counts:
        span = at[used : used + count]
        if not count or len(span) < count or span[-1] - span[0] != count - 1:
            return None
        spans.append((int(span[0]), int(span[-1]) + 1))
        used += count
    return spans if used == len(at) else None
