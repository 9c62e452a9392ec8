"""Image placeholders in prompts: one token in the chat template, as many as the image has after it.

Templates see text: an image part becomes the three tokens that the Qwen-VL families write for it, which every tokenizer
with these tokens encodes to their ids wherever they stand. What is rendered then has one placeholder per image, and
`repeats` says how often each token stands in the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import DataError
from stretto.data.pictures import is_image

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64

VISION_START, VISION_END, PLACEHOLDER = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, PLACEHOLDER, "<|video_pad|>")
_IMAGE_TEXT = VISION_START + PLACEHOLDER + VISION_END
_RUN = re.compile(f"(?:{re.escape(PLACEHOLDER)})+")

Message = dict[str, Any]


def with_placeholders(messages: Sequence[Message]) -> list[Message]:
    """The same messages, with the text of a placeholder instead of each image."""
    return [
        message | {"content": "".join(map(_text_of, message["content"]))} if has_image(message) else message
        for message in messages
    ]


def has_image(message: Message) -> bool:
    """Is an image among the parts of this message?"""
    content = message.get("content")
    return isinstance(content, list) and any(map(is_image, content))


def one_per_image(text: str) -> str:
    """Decoded tokens for people: one placeholder per image."""
    return _RUN.sub(PLACEHOLDER, text) if PLACEHOLDER in text else text


def _text_of(part: Any) -> str:
    if is_image(part):
        return _IMAGE_TEXT
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise DataError(f"beside an image, a message holds text parts and images, got {part!r:.60}.")
    return text


def repeats(
    token_ids: Int32[np.ndarray, " tokens"],
    placeholder: int,
    counts: Sequence[int],
    *,
    num_known: int = 0,
    num_sampled: int = 0,
) -> Int64[np.ndarray, " tokens"]:
    """How often each rendered token stands in the prompt: counts[i] for the i-th placeholder, 1 for all others.

    The first num_known tokens are expanded already; num_sampled placeholders after them are none of the template's.
    Raises: DataError if placeholders and images are not equally many.
    """
    found = np.flatnonzero(token_ids[num_known:] == placeholder)[num_sampled:] + num_known
    if len(found) != len(counts):
        raise DataError(
            f"{len(counts)} images, and {len(found)} placeholders {PLACEHOLDER!r} for them in the rendered messages: "
            "give images as parts of a message's content, not as text, to a model whose tokenizer has that token."
        )
    times = np.ones(len(token_ids), np.int64)
    times[found] = counts
    return times
