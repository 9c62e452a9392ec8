"""Tokenizer and image processor files of a randomly initialised model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stretto.chat.patches import ImageProcessor
from stretto.chat.tokenizer import CHAT_TOKENS, build_letters_tokenizer
from stretto.config.sections.model import ScratchSection, ScratchVisionSection
from stretto.data.messages import ROLES


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


def common_phrases(texts: Sequence[str], min_chars: int = 16) -> list[str]:
    """What of the first text all others have too, in pieces of at least min_chars: worth a token each as `phrases`.

    No piece goes over a chat token, or has the role at the head of a message.
    """
    first, others = texts[0], texts[1:]
    ends, role = "|".join(map(re.escape, CHAT_TOKENS)), rf"\A(?:{'|'.join(ROLES)})\n"
    found: dict[str, None] = {}
    for part in (re.sub(role, "", each) for each in re.split(ends, first)):
        start = 0
        while start + min_chars <= len(part):
            end = _common_end(part, start, others)
            if end - start >= min_chars:
                found[part[start:end]] = None
            start = end if end - start >= min_chars else start + 1
    return list(found)


def _common_end(part: str, start: int, others: Sequence[str]) -> int:
    """Where the longest piece of `part` from `start` on ends that all others have."""
    low, high = start, len(part)
    while low < high:
        middle = (low + high + 1) // 2
        if all(part[start:middle] in other for other in others):
            low = middle
        else:
            high = middle - 1
    return low
