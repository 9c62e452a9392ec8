"""Rows of a pass that belong to prompts with images, and the rotary positions of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stretto.inference.embedded.image_prompts import ImagePrompt
from stretto.inference.embedded.slots import SequenceSlots

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def prompt_rows(
    slots: SequenceSlots, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]
) -> Iterator[tuple[ImagePrompt, Int[np.ndarray, " rows"]]]:
    """The prompts with images that have rows in a pass, each with its rows.

    Row i is token positions[i] of slot owners[i] (-1: padding).
    """
    is_prompt: Bool[np.ndarray, " rows"] = (owners >= 0) & (positions < slots.num_prompt[owners])
    for slot in np.unique(owners[is_prompt]).tolist():
        if (prompt := slots.images.get(slot)) is not None:
            yield prompt, np.flatnonzero(is_prompt & (owners == slot))


def find_rotations(
    slots: SequenceSlots, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]
) -> Int[np.ndarray, "*axes rows"] | None:
    """The rotary positions of the rows of a pass; [3, rows] if a prompt with images is among them.

    None if they are the rows' positions in their sequences.
    """
    if not slots.images:
        return None
    shifts = np.where(owners < 0, 0, slots.shift[owners])
    shifted = positions + shifts
    whole = None
    for prompt, rows in prompt_rows(slots, owners, positions):
        if whole is None:
            whole = np.broadcast_to(shifted, (3, len(shifted))).copy()
        whole[:, rows] = prompt.positions[:, positions[rows]]
    if whole is None:
        return shifted if shifts.any() else None
    return whole
