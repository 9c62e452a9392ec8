"""Image placeholders in prompts: one token when the template is rendered, then one per token of the image.

Templates see text only: an image part is replaced by the text of the three tokens that the Qwen-VL families use for it.
The rendered tokens then have one placeholder per image, and `repeats` gives how often each token occurs in the prompt.
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
    """The messages, with the text of a placeholder instead of each image."""
    return [
        message | {"content": "".join(map(_text_of, message["content"]))} if has_image(message) else message
        for message in messages
    ]


def has_image(message: Message) -> bool:
    """Whether a message has an image among its parts."""
    content = message.get("content")
    return isinstance(content, list) and any(map(is_image, content))


def one_per_image(text: str) -> str:
    """Decoded tokens with each run of placeholders shortened to one, for display."""
    return _RUN.sub(PLACEHOLDER, text) if PLACEHOLDER in text else text


def _text_of(part: Any) -> str:
    if is_image(part):
        return _IMAGE_TEXT
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise DataError(f"a message with an image may have only text parts and images, got {part!r:.60}.")
    return text


def repeats(
    token_ids: Int32[np.ndarray, " tokens"],
    placeholder: int,
    counts: Sequence[int],
    *,
    num_known: int = 0,
    num_sampled: int = 0,
) -> Int64[np.ndarray, " tokens"]:
    """How often each rendered token occurs in the prompt: counts[i] for the i-th placeholder, 1 for all others.

    The first num_known tokens are expanded already; the next num_sampled placeholders were sampled by the policy.
    Raises: DataError if there is not one placeholder per image.
    """
    positions = np.flatnonzero(token_ids[num_known:] == placeholder)[num_sampled:] + num_known
    if len(positions) != len(counts):
        raise DataError(
            f"{len(counts)} images, and {len(positions)} placeholders {PLACEHOLDER!r} for them in the rendered "
            "messages: give images as parts of a message's content, not as text, to a model whose tokenizer has that "
            "token."
        )
    times = np.ones(len(token_ids), np.int64)
    times[positions] = counts
    return times
