"""A cache of the vision tower's output for images, by the hash of their pixels.

An image is encoded when a pass first reaches one of its tokens. Its vectors are reused for other prompts that show it,
later pieces of the same prompt, and later turns. The least recently used are dropped. A weight update that changes the
tower drops all; one that does not change it, as with a frozen tower, drops none.

Pixels are kept by the requests that show them; requests with equal images share them (`shared`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from stretto.inference.embedded.slots import SequenceSlots
from stretto.inference.embedded.vision.rows import prompt_rows
from stretto.models.parts.vision import ImageBatch, ImageVectors, VisionTower
from stretto.models.tensor_map import VISION_PREFIX
from stretto.records.images import Image

if TYPE_CHECKING:
    from jaxtyping import Int

MAX_BYTES = 512 * 2**20
"""Memory for vectors; the image used last is always kept."""


class ImageStore:
    """The vectors of recently used images."""

    def __init__(self, tower: VisionTower, device: torch.device, *, max_bytes: int = MAX_BYTES) -> None:
        self.tower, self.device, self.max_bytes = tower, device, max_bytes
        self.num_bytes = 0
        self.num_encoded = 0
        self._vectors: OrderedDict[str, ImageVectors] = OrderedDict()
        self._in_use: WeakValueDictionary[str, Image] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._vectors)

    def shared(self, images: Iterable[Image]) -> tuple[Image, ...]:
        """The same images, with the pixels of equal images of earlier requests."""
        return tuple(self._in_use.setdefault(image.hash, image) for image in images)

    @torch.inference_mode()
    def vectors(
        self, slots: SequenceSlots, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]
    ) -> ImageVectors | None:
        """The image vectors of a pass whose row i is token positions[i] of slot owners[i]; None if it has none."""
        if not slots.images:
            return None
        rows, parts = [], []
        for prompt, at in prompt_rows(slots, owners, positions):
            numbers = prompt.numbers[positions[at]]
            for number in np.unique(numbers[numbers >= 0]).tolist():
                shown = at[numbers == number]
                offsets = torch.from_numpy(prompt.offsets[positions[shown]]).to(self.device)
                encoded = self.encode(prompt.images[number])
                rows.append(shown)
                parts.append([x.index_select(0, offsets) for x in (encoded.embeddings, *encoded.deepstack)])
        if not rows:
            return None
        embeddings, *deepstack = (torch.cat(part) for part in zip(*parts))
        return ImageVectors(torch.from_numpy(np.concatenate(rows)).to(self.device), embeddings, tuple(deepstack))

    @torch.inference_mode()
    def encode(self, image: Image) -> ImageVectors:
        """The vectors of all tokens of an image.

        Each image is a pass of its own through the tower, so its bits do not depend on other images.
        """
        if (vectors := self._vectors.get(image.hash)) is not None:
            self._vectors.move_to_end(image.hash)
            return vectors
        assert image.patches is not None, f"image {image.hash} has no pixels"
        count = image.num_tokens(self.tower.shape.merge_size)
        patches = torch.from_numpy(np.array(image.patches, np.float32)).to(self.device)
        rows = torch.arange(count, device=self.device)
        vectors = self._vectors[image.hash] = self.tower(ImageBatch(patches, np.array([image.grid]), rows))
        self.num_encoded += 1
        self.num_bytes += _num_bytes(vectors)
        while self.num_bytes > self.max_bytes and len(self._vectors) > 1:
            self.num_bytes -= _num_bytes(self._vectors.popitem(last=False)[1])
        return vectors

    def clear(self) -> int:
        """Drop all vectors; returns their bytes."""
        freed, self.num_bytes = self.num_bytes, 0
        self._vectors.clear()
        return freed

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a weight update; the first one that changes the tower drops all vectors."""
        ours = {VISION_PREFIX + name: parameter for name, parameter in self.tower.named_parameters()}
        for name, tensor in tensors:
            if self._vectors and name in ours and not torch.equal(tensor.to(ours[name]), ours[name]):
                self.clear()
            yield name, tensor


def _num_bytes(vectors: ImageVectors) -> int:
    return sum(x.nbytes for x in (vectors.embeddings, *vectors.deepstack))
