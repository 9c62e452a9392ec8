"""Messages <-> tokens, so that exactly the sampled tokens are trained.

Hides the `renderers` library (one hand-written renderer per model family) and the choice of family. Chat messages in
OpenAI's format go in, token ids come out:

    render_prompt(messages)                 the prompt that the engine continues
    extend(prompt, completion, messages)    the next turn's prompt, which begins with all earlier tokens
    render_sft(messages)                    a whole conversation, and which of its tokens are trained
    parse(completion)                       the message in a completion

Guarantee: for a conversation made by `render_prompt`, sampling and `extend`, the tokens that `render_sft` marks in
assistant turns are exactly those that the engine would have sampled: without the `<think>` wrapper that is part of the
prompt, and with the end token. Importing the library takes half a second, so only `build_renderer` does it.

Messages may have images (images.py) if the model has an image processor. The prompt has one placeholder token per token
that the model makes of an image; `images_of` returns the pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from pydantic import ValidationError

from stretto.base.errors import ConfigError, DataError
from stretto.chat.images import CONFIG_FILES, ImageProcessor
from stretto.chat.placeholders import PLACEHOLDER, one_per_image, repeats, with_placeholders
from stretto.chat.tokenizer import Tokenizer, is_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import RendererSection, ScratchSection
from stretto.config.sections.sft import LossMaskSection
from stretto.data.pictures import image_parts
from stretto.records.images import Image, placeholder_spans

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, Int32, Int64

Message = dict[str, Any]

STEP_LOSS_MASK = "step_loss_mask"
"""Key of a message in the data: 0 excludes the message from the loss."""
FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "qwen3_5": "qwen3.5",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
    "llama": "llama-3",
    "glm4_moe": "glm-4.5",
    "glm_moe_dsa": "glm-5",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "gpt_oss": "gpt-oss",
    "nemotron_h": "nemotron-3",
    "laguna": "laguna-xs.2",
}
_SCRATCH_FAMILIES = get_args(ScratchSection.model_fields["family"].annotation)


class Renderer:
    """Messages <-> tokens for one tokenizer and one family of chat templates."""

    def __init__(self, tokenizer: Tokenizer, backend: Any, family: str, images: ImageProcessor | None = None):
        self.tokenizer = tokenizer
        self.images = images
        self.image_token_id = None if images is None else tokenizer.token_id(PLACEHOLDER)
        self.family = family
        self._backend = backend
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(backend.get_stop_token_ids()))
        self._reply_prefix = self._find_reply_prefix()

    def render_prompt(
        self, messages: Sequence[Message], tools: list[Message] | None = None
    ) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of the conversation, up to the start of the model's reply."""
        ids = self._backend.render_ids(self._plain(messages), tools=tools, add_generation_prompt=True)
        return self._expanded(np.asarray(ids, np.int32), messages)

    def render_text(self, messages: Sequence[Message], tools: list[Message] | None = None) -> str:
        """The conversation as text, up to the start of the model's reply."""
        return self.decode(self.render_prompt(messages, tools))

    def render_leading(self, messages: Sequence[Message]) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of the first messages of a conversation, without the start of a reply."""
        ids = self._backend.render_ids(self._plain(messages), add_generation_prompt=False)
        return self._expanded(np.asarray(ids, np.int32), messages)

    def images_of(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        """The images of a conversation with their patches, in the order of their placeholders.

        Raises: DataError for an image that cannot be read; ConfigError if the model takes text only.
        """
        return tuple(self._processor(where).image(part, where) for part, where in image_parts(messages))

    def last_cut(
        self, token_ids: Int[np.ndarray, " tokens"], images: Sequence[Image], max_tokens: int
    ) -> int:
        """The length, at most max_tokens, to which a sequence can be cut without splitting an image."""
        for start, stop in self._spans(token_ids, images):
            if start < max_tokens < stop:
                return start
        return min(max_tokens, len(token_ids))

    def images_within(
        self, token_ids: Int[np.ndarray, " tokens"], images: Sequence[Image], end: int
    ) -> tuple[Image, ...]:
        """The images among the first `end` tokens; `end` splits no image."""
        return tuple(image for image, (_, stop) in zip(images, self._spans(token_ids, images)) if stop <= end)

    def _spans(self, token_ids: Int[np.ndarray, " tokens"], images: Sequence[Image]) -> list[tuple[int, int]]:
        spans, _ = self._find_spans(token_ids, images)
        assert spans is not None, "the renderer has placed one placeholder per token of each image"
        return spans

    def _find_spans(
        self, token_ids: Int[np.ndarray, " tokens"], images: Sequence[Image]
    ) -> tuple[list[tuple[int, int]] | None, int]:
        """Where the placeholders of each image are, None if they do not fit; and how many the images need."""
        if self.images is None or self.image_token_id is None:
            return [], 0
        counts = [image.num_tokens(self.images.merge_size) for image in images]
        return placeholder_spans(token_ids, self.image_token_id, counts), sum(counts)

    def check_images(
        self, token_ids: Int[np.ndarray, " tokens"], images: Sequence[Image], where: str = "the prompt"
    ) -> None:
        """Raises: DataError if the placeholders among these tokens do not fit these images."""
        spans, num_needed = self._find_spans(token_ids, images)
        if spans is None:
            num_found = int(np.count_nonzero(np.asarray(token_ids) == self.image_token_id))
            raise DataError(
                f"{where} has {num_found} placeholders {PLACEHOLDER!r}; its {len(images)} images need {num_needed}, "
                "those of one image in a row. Show images in messages, which are rendered with their placeholders."
            )

    def extend(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        new_messages: Sequence[Message],
        tools: list[Message] | None = None,
    ) -> Int32[np.ndarray, " tokens"] | None:
        """The next turn's prompt: all earlier tokens, then the new messages (none of the assistant's).

        A truncated completion is closed first. None if the template rewrites the history here (it may drop old
        thinking): the caller must then render the whole conversation and start another branch.
        """
        bridged = self._bridge(prompt_ids, completion_ids, new_messages, tools)
        if bridged is None:
            return None
        return self._expanded(
            np.asarray(bridged.token_ids, np.int32), new_messages, after=(prompt_ids, completion_ids)
        )

    def text_owners(
        self,
        messages: Sequence[Message],
        tools: list[Message] | None = None,
        *,
        after: tuple[Int[np.ndarray, " prompt"], Int[np.ndarray, " completion"]] | None = None,
    ) -> Int64[np.ndarray, " tokens"]:
        """Index (int64) of the message to whose text each prompt token belongs; -1 for other tokens.

        The prompt is `render_prompt(messages)` or, with after = (prompt, completion), `extend(*after, messages)`; the
        tokens of `after` and of the template are -1.
        """
        if after is None:
            rendered = self._backend.render(self._plain(messages), tools=tools, add_generation_prompt=True)
        else:
            rendered = self._bridge(*after, messages, tools)
        ids = np.asarray(rendered.token_ids, np.int32)
        owners = np.asarray(rendered.message_indices, np.int64)
        is_text = np.asarray(rendered.is_content, bool)
        assert len(is_text) == len(owners) == len(ids), f"{self.family} attributes no tokens"
        times = self._repeats(ids, messages, after)
        return np.repeat(np.where(is_text & ~self._is_image(ids), owners, -1), times)

    def render_sft(
        self, messages: Sequence[Message], loss_mask: LossMaskSection, tools: list[Message] | None = None
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids (int32) of a whole conversation, and which of them are trained (bool).

        Assistant turns train the tokens that the model samples, other roles in `loss_mask` the text of the message,
        and messages with `step_loss_mask` = 0 nothing.
        """
        plain = [
            {k: v for k, v in message.items() if k != STEP_LOSS_MASK} for message in self._plain(messages)
        ]
        rendered = self._backend.render(plain, tools=tools)
        ids = np.asarray(rendered.token_ids, np.int32)
        owners = np.asarray(rendered.message_indices, np.int64)
        is_sampled = np.asarray(rendered.sampled_mask, bool)
        is_text = np.asarray(rendered.is_content, bool)
        assert len(is_sampled) == len(is_text) == len(ids), f"renderer {self.family} attributes no tokens"
        mask = np.zeros(len(ids), bool)
        for i, message in enumerate(messages):
            role = message["role"]
            if not getattr(loss_mask, role, False) or message.get(STEP_LOSS_MASK) == 0:
                continue
            is_message = owners == i
            mask |= is_message & (is_sampled if role == "assistant" else is_text)
            if role == "assistant":
                mask[self._prefix_of_turn(ids, is_message)] = False
        times = self._repeats(ids, messages)
        return np.repeat(ids, times), np.repeat(mask & ~self._is_image(ids), times)

    def parse(
        self,
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None = None,
        tools: list[Message] | None = None,
    ) -> Message:
        """Parse a completion into the assistant's message: content, reasoning_content, tool_calls.

        `unparsed_tool_calls` has the text of invalid calls; an environment can answer them.
        """
        parsed = self._backend.parse_response(
            [int(t) for t in completion_ids],
            tools=tools,
            prompt_ids=None if prompt_ids is None else [int(t) for t in prompt_ids],
        )
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [call for call in parsed.tool_calls if call.status == "ok"]
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        if broken := [call.raw for call in parsed.tool_calls if call.status != "ok"]:
            message["unparsed_tool_calls"] = broken
        return message

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of a text, without special tokens around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, token_ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> str:
        """Text of token ids, with the text of special tokens."""
        return self.tokenizer.decode(token_ids)

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as templates take them, with text only.

        Raises: ConfigError for an image if the model takes text only.
        """
        for _, where in image_parts(messages):
            self._processor(where)
        return with_placeholders(messages)

    def _bridge(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        messages: Sequence[Message],
        tools: list[Message] | None,
    ) -> Any:
        before = [int(t) for t in prompt_ids], [int(t) for t in completion_ids]
        return self._backend.bridge_to_next_turn(*before, self._plain(messages), tools=tools)

    def _expanded(
        self,
        ids: Int32[np.ndarray, " rendered"],
        messages: Sequence[Message],
        after: tuple[Any, Any] | None = None,
    ) -> Int32[np.ndarray, " tokens"]:
        """Rendered tokens with each placeholder repeated, as `_repeats` counts."""
        return ids if self.image_token_id is None else np.repeat(ids, self._repeats(ids, messages, after))

    def _repeats(
        self,
        ids: Int32[np.ndarray, " rendered"],
        messages: Sequence[Message],
        after: tuple[Any, Any] | None = None,
    ) -> Int64[np.ndarray, " rendered"]:
        """How often each rendered token occurs in the prompt; after: prompt and completion, expanded already."""
        if self.image_token_id is None:
            return np.ones(len(ids), np.int64)
        merge = self._processor("messages").merge_size
        counts = [image.num_tokens(merge) for image in self.images_of(messages)]
        if after is None:
            return repeats(ids, self.image_token_id, counts)
        prompt_ids, completion_ids = (np.asarray(part) for part in after)
        num_sampled = int(np.count_nonzero(completion_ids == self.image_token_id))
        num_known = len(prompt_ids)
        return repeats(ids, self.image_token_id, counts, num_known=num_known, num_sampled=num_sampled)

    def _is_image(self, ids: Int32[np.ndarray, " rendered"]) -> Bool[np.ndarray, " rendered"]:
        return np.zeros(len(ids), bool) if self.image_token_id is None else ids == self.image_token_id

    def _processor(self, where: str) -> ImageProcessor:
        if self.images is None:
            raise ConfigError(
                f"{where} is an image, but {self.tokenizer.name_or_path} is a model of text: it has no image processor "
                f"of a Qwen-VL family ({' or '.join(CONFIG_FILES)}). Give such a model, or remove the image."
            )
        return self.images

    def readable(self, token_ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> str:
        """Text of token ids for display, with one placeholder per image."""
        return one_per_image(self.decode(token_ids))

    def pictures(self, images: Sequence[Image]) -> tuple[bytes, ...]:
        """These images as PNG files, for display."""
        return () if self.images is None else tuple(map(self.images.png, images))

    def _find_reply_prefix(self) -> Int32[np.ndarray, " prefix"]:
        """Tokens before every reply: the role header and, with thinking off, an empty thought."""
        messages = [{"role": "user", "content": "a"}]
        num_tokens = len(self._backend.render_ids(messages))
        with_prefix = self._backend.render_ids(messages, add_generation_prompt=True)
        return np.asarray(with_prefix[num_tokens:], np.int32)

    def _prefix_of_turn(
        self, ids: Int32[np.ndarray, " tokens"], is_message: Bool[np.ndarray, " tokens"]
    ) -> slice:
        """Where the reply prefix of a message is; empty if the message does not begin with it."""
        start = int(is_message.argmax())
        stop = start + len(self._reply_prefix)
        return slice(start, stop if np.array_equal(ids[start:stop], self._reply_prefix) else start)


def build_renderer(
    tokenizer: str | Path | Tokenizer,
    section: RendererSection | None = None,
    model_type: str | None = None,
    images: ImageProcessor | None = None,
) -> Renderer:
    """Build the renderer of a tokenizer (a directory, or loaded) for the family in `section`.

    images: the model's image processor; None if the model takes text only.
    With name = "auto" the family follows from the model's type; a model from scratch has Qwen3's chat tokens.

    Raises: ConfigError if no family fits or the vocabulary lacks the family's special tokens.
    """
    section = section or RendererSection()
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    family = section.name if section.name != "auto" else FAMILY_OF_MODEL_TYPE.get(model_type or "")
    if section.name == "auto" and model_type in _SCRATCH_FAMILIES and is_letters_tokenizer(tokenizer):
        family = "qwen3"
    if family is None:
        raise ConfigError(
            f'[renderer] name = "auto" has no chat template for model_type {model_type!r}; '
            f"set name to one of {', '.join(sorted(set(FAMILY_OF_MODEL_TYPE.values())))}."
        )
    if images is not None and tokenizer.token_id(PLACEHOLDER) is None:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the model has an image processor, but its tokenizer has no {PLACEHOLDER!r}; "
            "only the tokens of the Qwen-VL families are supported."
        )
    return Renderer(tokenizer, _build_backend(tokenizer, family, section), family, images)


def _with_settings(config: Any, settings: dict[str, Any], family: str) -> Any:
    """The config of a family's template with these settings.

    Raises: ConfigError for a setting or a value that the template does not have.
    """
    known = [name for name in type(config).model_fields if name != "name"]
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigError(
            f"[renderer] settings.{unknown[0]}: the template of {family!r} has no such setting; it has "
            f"{', '.join(known)}"
        )
    try:
        return type(config)(**settings)
    except ValueError as cause:
        first = cause.errors()[0] if isinstance(cause, ValidationError) else {"loc": ("",), "msg": str(cause)}
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"[renderer] settings.{name} = {settings.get(name)!r} for the template of {family!r}: {first['msg']}"
        ) from cause


def _build_backend(tokenizer: Tokenizer, family: str, section: RendererSection) -> Any:
    import renderers

    try:
        config = renderers.config_from_name(family)
    except ValueError as cause:
        raise ConfigError(f"[renderer] name = {family!r} is not a known family: {cause}") from cause
    if config is None or family in ("default", "custom"):
        raise ConfigError(
            f"[renderer] name = {family!r} cannot tell sampled tokens from those of the template; "
            "set name to the model's family."
        )
    fields = renderers.template_field_names(config)
    settings = {"enable_thinking": section.enable_thinking} if "enable_thinking" in fields else {}
    if section.clear_thinking is not None:
        if "clear_thinking" not in fields:
            raise ConfigError(
                f"[renderer] clear_thinking = {str(section.clear_thinking).lower()}: the template of {family!r} has no "
                "such setting; remove it"
            )
        settings["clear_thinking"] = section.clear_thinking
    settings |= section.settings
    if settings:
        config = _with_settings(config, settings, family)
    try:
        return renderers.create_renderer(tokenizer, config)
    except AssertionError as cause:
        raise ConfigError(
            f"[renderer] name = {family!r} does not fit {tokenizer.name_or_path}: {cause}"
        ) from cause
