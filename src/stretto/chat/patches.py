"""Pictures -> pixel patches, as the image processors of the Qwen-VL families make them.

An image part of a message names a picture (data/pictures.py). `ImageProcessor` resizes it to whole patches, normalises
it and cuts it into patches, with the parameters in `preprocessor_config.json` (or `processor_config.json`) of the model
directory. The result equals that of transformers' Qwen2VLImageProcessor.
"""

from __future__ import annotations

import io
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import DataError
from stretto.data.pictures import Part, identity_of, image_parts, read_picture, source_of
from stretto.records.images import Image, image_of

if TYPE_CHECKING:
    from jaxtyping import Float32, UInt8
    from PIL.Image import Image as Picture

CONFIG_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_ASPECT_RATIO = 200
_BICUBIC = 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_CACHE_BYTES = 256 * 2**20
_PROCESSOR_TYPES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")


@dataclass(frozen=True)
class ImageProcessor:
    """Makes patches of pictures for one model, and caches them."""

    patch_size: int = 16
    """Pixels along one side of a patch."""
    merge_size: int = 2
    """Patches along one side of the square that becomes one token."""
    temporal_patch_size: int = 2
    """Frames of a patch; a picture is repeated in all of them."""
    min_pixels: int = 65_536
    """Smaller pictures are enlarged."""
    max_pixels: int = 16_777_216
    """Larger pictures are made smaller."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    resample: int = _BICUBIC
    """Pillow's number of the filter."""
    _cache: OrderedDict[bytes, Image] = field(default_factory=OrderedDict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def image(self, part: Part, where: str) -> Image:
        """The patches of the picture in an image part; `where` is its place for errors.

        The same picture gives the same array while it is among the latest _CACHE_BYTES. Any thread may call this.

        Raises: DataError if there is no such picture, or it cannot be read.
        """
        source = source_of(part, where)
        key = identity_of(source, where)
        with self._lock:
            if (image := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return image
        image = self.process(read_picture(source, where), where)
        with self._lock:
            image = self._cache.setdefault(key, image)  # another thread may have read the same picture
            used = sum(each.patches.nbytes for each in self._cache.values() if each.patches is not None)
            while used > _CACHE_BYTES and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                used -= 0 if oldest.patches is None else oldest.patches.nbytes
        return image

    def process(self, picture: Picture, where: str = "the image") -> Image:
        """The patches of a picture.

        Raises: DataError if its sides are too unequal.
        """
        width, height = picture.size
        size = self.size_of(height, width, where)
        picture = picture.convert("RGB")
        if size != (height, width):
            picture = picture.resize(size[::-1], resample=self.resample)
        patches = self._patches(np.asarray(picture))
        patches.flags.writeable = False
        return image_of(patches, (1, size[0] // self.patch_size, size[1] // self.patch_size))

    def size_of(self, height: int, width: int, where: str = "the image") -> tuple[int, int]:
        """Height and width, in pixels, to which a picture of this size is resized.

        Both are multiples of patch_size * merge_size, their product is min_pixels to max_pixels, and their ratio is
        about that of the picture. Raises: DataError if one side is over 200 times the other.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise DataError(
                f"{where}: {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other."
            )
        unit = self.patch_size * self.merge_size
        sides = [round(side / unit) * unit for side in (height, width)]
        if sides[0] * sides[1] > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            sides = [max(unit, math.floor(side / ratio / unit) * unit) for side in (height, width)]
        elif sides[0] * sides[1] < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * ratio / unit) * unit for side in (height, width)]
        return sides[0], sides[1]

    def _patches(self, pixels: UInt8[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches dim"]:
        size, merge = self.patch_size, self.merge_size
        scaled = (pixels.astype(np.float64) * self.rescale_factor).astype(np.float32)
        normal = (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        height, width = (side // size // merge for side in pixels.shape[:2])
        blocks = normal.reshape(height, merge, size, width, merge, size, 3)
        # Patches of one token are adjacent: [block row, block column, row, column, channel, y, x].
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
        frames = np.repeat(blocks[:, :, :, :, :, None], self.temporal_patch_size, axis=5)
        return frames.reshape(height * width * merge**2, -1)

    def png(self, image: Image) -> bytes:
        """The picture of these patches, as the model sees it, as a PNG file."""
        from PIL import Image as pillow

        assert image.patches is not None
        merge, size = self.merge_size, self.patch_size
        height, width = (side // merge for side in image.grid[1:])
        blocks = image.patches.reshape(height, width, merge, merge, 3, self.temporal_patch_size, size, size)
        pixels = blocks[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
        pixels = pixels.reshape(height * merge * size, width * merge * size, 3)
        pixels = (pixels * np.array(self.std) + np.array(self.mean)) / self.rescale_factor
        file = io.BytesIO()
        pillow.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(file, "png")
        return file.getvalue()

    def save(self, directory: str | Path) -> None:
        """Write these parameters as `preprocessor_config.json`, for transformers and vLLM."""
        values = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "image_mean": self.mean,
            "image_std": self.std,
            "rescale_factor": self.rescale_factor,
            "resample": self.resample,
        }
        (Path(directory) / CONFIG_FILES[0]).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_image_processor(directory: str | Path) -> ImageProcessor | None:
    """The image processor of a model directory; None if it has none of a Qwen-VL family.

    Raises: DataError for a file that is not JSON, or that turns a step of the processing off.
    """
    for name in CONFIG_FILES:
        file = Path(directory) / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as cause:
            raise DataError(f"{file}: not JSON: {cause}") from cause
        found = found.get("image_processor", found) if isinstance(found, dict) else {}
        kind = str(found.get("image_processor_type", ""))
        if kind.startswith(_PROCESSOR_TYPES) or (not kind and "merge_size" in found):
            return _processor_of(found, file)
    return None


def _processor_of(found: dict[str, Any], file: Path) -> ImageProcessor:
    skipped = [name for name in ("do_resize", "do_rescale", "do_normalize") if found.get(name) is False]
    if skipped:
        raise DataError(f"{file}: {skipped[0]} = false is not supported; pictures are resized and normalised.")
    size = found.get("size") or {}
    # Defaults are those of transformers' class, not ours.
    return ImageProcessor(
        patch_size=found.get("patch_size", 14),
        merge_size=found.get("merge_size", 2),
        temporal_patch_size=found.get("temporal_patch_size", 2),
        min_pixels=found.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
        max_pixels=found.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        mean=tuple(found.get("image_mean") or _CLIP_MEAN),
        std=tuple(found.get("image_std") or _CLIP_STD),
        rescale_factor=found.get("rescale_factor", 1 / 255),
        resample=found.get("resample", _BICUBIC),
    )


def refuse_paths(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse images by path in messages from the network: the path would be read on this host.

    Raises: DataError for an image that is not a data URL.
    """
    for part, where in image_parts(messages):
        source = source_of(part, where)
        if not isinstance(source, str) or not source.startswith("data:"):
            raise DataError(f"{where}: an image must be a data URL here, `data:image/...;base64,...`.")
