"""The files beside the weights of a model made from scratch: tokenizer and, with a vision tower, image processor."""

from __future__ import annotations

from pathlib import Path

from stretto.chat.images import ImageProcessor
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import ScratchSection, ScratchVisionSection


def build_scratch_files(directory: str | Path, scratch: ScratchSection) -> Path:
    """Write these files; they are the same in every process."""
    path = build_letters_tokenizer(directory, phrases=scratch.phrases, has_images=scratch.vision is not None)
    if scratch.vision is not None:
        image_processor_of(scratch.vision).save(path)
    return path


def image_processor_of(vision: ScratchVisionSection) -> ImageProcessor:
    """The image processor of a random network's vision tower: pictures keep their size, if it is not too large."""
    side = vision.patch_size * vision.merge_size
    return ImageProcessor(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        min_pixels=side**2,
        max_pixels=vision.max_tokens * side**2,
    )
