"""Packing of samples into rows of limited length, for orchestrator and trainer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int

SAMPLES_PER_SLICE = 32


def first_fit_decreasing(
    lengths: Int[np.ndarray, " samples"],
    capacity: int,
    images: Sequence[Mapping[str, int]] = (),
    max_patches: int | None = None,
) -> Generator[None, None, list[list[int]]]:
    """Pack samples, longest first, into the first row with room; returns the indices per row.

    images: by sample, the number of patches of each of its images by hash; an image counts once in a row. A row has at
    most max_patches, unless one sample alone has more.

    It is a generator that yields after each sample with images and each SAMPLES_PER_SLICE others, so that other tasks
    can run. Rows are in order of creation.
    """
    rows: list[list[int]] = []
    shown: list[dict[str, int]] = []  # images by row
    free = np.zeros(len(lengths), dtype=np.int64)
    for number, index in enumerate(np.argsort(-lengths, kind="stable").tolist(), 1):
        size = int(lengths[index])
        num_rows = len(rows)
        fits = free[:num_rows] >= size
        if images and max_patches is not None:
            for other in np.flatnonzero(fits).tolist():
                fits[other] = sum((shown[other] | images[index]).values()) <= max_patches
                if fits[other]:
                    break
        row = int(fits.argmax()) if num_rows else 0
        if not num_rows or not fits[row]:
            row = num_rows
            rows.append([])
            shown.append({})
            free[row] = capacity
        rows[row].append(index)
        free[row] -= size
        if images:
            shown[row] |= images[index]
        if images or number % SAMPLES_PER_SLICE == 0:
            yield
    return rows


def pack_rows(lengths: Int[np.ndarray, " samples"], capacity: int) -> list[list[int]]:
    """Pack samples as `first_fit_decreasing` does, at once."""
    work = first_fit_decreasing(lengths, capacity)
    while True:
        try:
            next(work)
        except StopIteration as end:
            rows: list[list[int]] = end.value
            return rows
