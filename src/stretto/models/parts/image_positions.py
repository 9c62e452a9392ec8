"""Positions of tokens in rows with images: one row each for time, height and width.

A text token has the same position in all three. The tokens of an image start from one origin, and count from it by
frame, line and column of merged patches; the text behind the image continues after the larger of lines and columns. So
positions are smaller than indices, which attention uses (attention.py).

Source: Qwen2-VL, arXiv:2409.12191, section 2.1 (M-RoPE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stretto.base.errors import DataError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def count_features(grids: Int[np.ndarray, "images 3"], merge_size: int) -> Int[np.ndarray, " images"]:
    """The number of tokens of each image: patches merged by merge_size along both sides."""
    return np.asarray(grids, np.int64).prod(axis=1) // merge_size**2


def image_positions(
    token_ids: Int[np.ndarray, " tokens"],
    bounds: Int[np.ndarray, " bounds"],
    grids: Int[np.ndarray, "images 3"],
    *,
    image_token_id: int,
    merge_size: int,
) -> Int[np.ndarray, "3 tokens"]:
    """Positions in packed documents, from 0 in each: document d is bounds[d]:bounds[d + 1].

    grids: (frames, lines, columns) in patches of the images in the row, in order.

    Raises: DataError if the image tokens are not those of the grids.
    """
    bounds = np.asarray(bounds, np.int64)
    is_image = np.asarray(token_ids) == image_token_id
    starts = find_images(is_image, grids, merge_size)
    sizes = count_features(grids, merge_size)
    # Each text token advances the position by 1, the first token of an image by its larger side.
    steps = (~is_image).astype(np.int64)
    sides = np.asarray(grids, np.int64)[:, 1:].max(axis=1, initial=0) // merge_size
    steps[starts] = sides
    before = np.concatenate(([0], np.cumsum(steps)))
    lengths = np.diff(bounds)
    origins = before[:-1] - np.repeat(before[bounds[:-1]], lengths)
    positions = np.broadcast_to(origins, (3, len(origins))).copy()
    for start, size, grid in zip(starts.tolist(), sizes.tolist(), np.asarray(grids).tolist()):
        places = np.indices((grid[0], grid[1] // merge_size, grid[2] // merge_size)).reshape(3, -1)
        positions[:, start : start + size] = origins[start] + places
    return positions


def find_images(
    is_image: Bool[np.ndarray, " tokens"], grids: Int[np.ndarray, "images 3"], merge_size: int
) -> Int[np.ndarray, " images"]:
    """The index of the first token of each image.

    Raises: DataError if the image tokens are not those of the grids.
    """
    sizes = count_features(grids, merge_size)
    tokens = np.flatnonzero(is_image)
    if len(tokens) != sizes.sum():
        raise DataError(
            f"{len(tokens)} image tokens for {len(sizes)} images, which take {sizes.sum()}; each image needs as many "
            "placeholders as it has merged patches"
        )
    firsts = np.cumsum(sizes) - sizes
    starts = tokens[firsts] if len(sizes) else np.zeros(0, np.int64)
    if np.any(tokens[firsts + sizes - 1] - starts != sizes - 1):
        raise DataError("the placeholders of an image must follow each other without other tokens between them")
    return starts
