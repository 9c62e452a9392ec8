"""The images of a micro batch: which part of which image each token shows, and what a pass needs.

Images with equal hashes are one image: the samples of a group share that of their prompt, and a pass encodes it once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.families.shape import VisionShape
from stretto.models.parts.image_positions import find_images, image_positions
from stretto.models.parts.vision import ImageBatch
from stretto.records.images import Image
from stretto.records.sample import MicroBatch

if TYPE_CHECKING:
    from jaxtyping import Int


class RowImages:
    """The images of a row, by token."""

    def __init__(self, mb: MicroBatch, shape: VisionShape) -> None:
        """Raises: DataError if a document's placeholders are not those of its images."""
        self.shape = shape
        self.is_image = mb.token_ids == shape.image_token_id
        _check_documents(mb, self.is_image, shape)
        self.images = list({image.hash: image for image in mb.images}.values())
        index = {image.hash: number for number, image in enumerate(self.images)}
        grids = _grids(mb.images)
        self.identity = np.full(len(mb.token_ids), -1)
        """Number of the image that a token shows, -1 for text."""
        self._offset = np.zeros(len(mb.token_ids), np.int64)  # index of the merged patch that a token shows
        for image, start in zip(mb.images, find_images(self.is_image, grids, shape.merge_size).tolist(), strict=True):
            size = image.num_tokens(shape.merge_size)
            self.identity[start : start + size] = index[image.hash]
            self._offset[start : start + size] = np.arange(size)
        self._positions = image_positions(
            mb.token_ids,
            np.asarray(mb.cu_seqlens, np.int64),
            grids,
            image_token_id=shape.image_token_id,
            merge_size=shape.merge_size,
        )

    def select(
        self, inputs: Int[np.ndarray, " inputs"], device: torch.device
    ) -> tuple[ImageBatch | None, Int[Tensor, "3 inputs"]]:
        """Images and positions of a pass over these tokens; no ImageBatch if none of them shows an image."""
        positions = torch.from_numpy(self._positions[:, inputs]).to(device)
        rows = np.flatnonzero(self.is_image[inputs])
        if not len(rows):
            return None, positions
        used, numbers = np.unique(self.identity[inputs[rows]], return_inverse=True)
        images = [self.images[number] for number in used.tolist()]
        sizes = np.array([image.num_tokens(self.shape.merge_size) for image in images])
        features = (np.cumsum(sizes) - sizes)[numbers] + self._offset[inputs[rows]]
        patches = torch.from_numpy(np.concatenate([image.patches for image in images])).to(device)
        to_device = lambda values: torch.from_numpy(values).to(device)
        return ImageBatch(patches, _grids(images), to_device(rows), to_device(features)), positions


def _grids(images: list[Image] | tuple[Image, ...]) -> Int[np.ndarray, "images 3"]:
    return np.array([image.grid for image in images], np.int64).reshape(-1, 3)


def _check_documents(mb: MicroBatch, is_image: np.ndarray, shape: VisionShape) -> None:
    bounds, merge = np.asarray(mb.cu_seqlens), shape.merge_size
    placeholders = np.add.reduceat(np.append(is_image, False).astype(np.int64), bounds[:-1])
    placeholders[np.diff(bounds) == 0] = 0
    for document, num_shown in enumerate(placeholders.tolist()):
        name = mb.sample_ids[document] if document < mb.num_samples else f"document {document}"
        images = mb.images_of(document)
        num_needed = sum(image.num_tokens(merge) for image in images)
        if num_shown != num_needed:
            raise DataError(
                f"sample {name} has {num_shown} image tokens (id {shape.image_token_id}), and its {len(images)} images "
                f"take {num_needed}; is the sample rendered for another model?"
            )
        for image in images:
            expected = (image.num_patches, shape.patch_values)
            if image.patches is None or image.patches.shape != expected:
                got = "no patches" if image.patches is None else f"patches {list(image.patches.shape)}"
                raise DataError(
                    f"sample {name}: image {image.hash} of grid {list(image.grid)} has {got}, not {list(expected)}; "
                    "is it processed for another model?"
                )
