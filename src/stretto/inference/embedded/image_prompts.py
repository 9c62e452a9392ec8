"""Prompts with images: which token shows which image, at which positions, and which requests are refused.

Positions in such a prompt have three axes (models/parts/image_positions.py). After the prompt, a token's position is
its index plus a constant shift, because an image takes more tokens than positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stretto.families.shape import VisionShape
from stretto.models.parts.image_positions import image_positions
from stretto.records.generate import GenerateRequest
from stretto.records.images import Image, placeholder_spans
from stretto.transports.engine import images as wire

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """The images of a prompt, by token."""

    images: tuple[Image, ...]
    numbers: Int[np.ndarray, " tokens"]
    """Which image a token shows; -1 for text."""
    offsets: Int[np.ndarray, " tokens"]
    """Which merged patch of the image a token shows."""
    positions: Int[np.ndarray, "3 tokens"]
    shift: int
    """Position minus index of every token after the prompt."""

    @classmethod
    def of(cls, spec: GenerateRequest, shape: VisionShape) -> ImagePrompt | None:
        """The images of a request for which `refusal_reason` returned None; None if it has none."""
        if not spec.images:
            return None
        ids = spec.prompt_ids
        counts = [image.num_tokens(shape.merge_size) for image in spec.images]
        spans = placeholder_spans(ids, shape.image_token_id, counts)
        assert spans is not None, "a request whose images have no placeholders is refused"
        numbers, offsets = np.full(len(ids), -1), np.zeros(len(ids), np.int64)
        for number, (start, end) in enumerate(spans):
            numbers[start:end] = number
            offsets[start:end] = np.arange(end - start)
        positions = image_positions(
            np.append(ids, -1),  # the first token after the prompt
            np.array([0, len(ids) + 1]),
            np.array([image.grid for image in spec.images]),
            image_token_id=shape.image_token_id,
            merge_size=shape.merge_size,
        )
        shift = int(positions[0, -1]) - len(ids)
        return cls(spec.images, numbers, offsets, positions[:, :-1], shift)

    def marks(self, block_size: int) -> Mapping[int, bytes]:
        """The hashes of the images in each block that has image tokens, by block number."""
        at = np.flatnonzero(self.numbers >= 0)
        pairs = np.unique(np.stack((at // block_size, self.numbers[at])), axis=1).T.tolist()
        marks: dict[int, bytes] = {}
        for block, number in pairs:
            marks[block] = marks.get(block, b"") + self.images[number].hash.encode()
        return marks


def refusal_reason(spec: GenerateRequest, shape: VisionShape | None) -> str | None:
    """Why a request's images, or its placeholders without images, are refused; None if they are valid."""
    sizes = None if shape is None else wire.VisionSizes(shape.patch_values, shape.merge_size)
    if (reason := wire.refusal_reason(spec, sizes)) is not None or shape is None:
        return reason
    if not spec.images:
        if (count := int((spec.prompt_ids == shape.image_token_id).sum())) == 0:
            return None
        return (
            f"token_ids: {count} placeholders of images (token {shape.image_token_id}), but no images; send the "
            "images in `features`, or as parts of messages"
        )
    if spec.image_token_id != shape.image_token_id:
        return (
            f"features: the placeholders are token {spec.image_token_id}; this model's are token {shape.image_token_id}"
        )
    return None
