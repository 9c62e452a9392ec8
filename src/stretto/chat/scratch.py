"""Tokenizer and image processor files of a randomly initialised model."""

from __future__ import annotations

from pathlib import Path

from stretto.chat.patches import ImageProcessor
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import ScratchSection, ScratchVisionSection


def build_scratch_files(directory: str | Path, scratch: ScratchSection) -> Path:
    """Write the tokenizer and, for a vision tower, the image processor; every process writes the same bytes."""
    path = build_letters_tokenizer(directory, phrases=scratch.phrases, has_images=scratch.vision is not None)
    if scratch.vision is not None:
        image_processor_of(scratch.vision).save(path)
    return path


def image_processor_of(vision: ScratchVisionSection) -> ImageProcessor:
    """The image processor for a random vision tower; it keeps the size of pictures up to max_tokens."""
    side = vision.patch_size * vision.merge_size
    return ImageProcessor(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        min_pixels=side**2,
        max_pixels=vision.max_tokens * side**2,
    )
