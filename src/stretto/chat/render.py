"""Messages <-> tokens, so that exactly the sampled tokens are trained.

Hides the `renderers` library (one hand-written renderer per model family) and the choice of family. Chat messages in
OpenAI's format go in, token ids come out:

    render_prompt(messages)                 what the engine continues
    extend(prompt, completion, messages)    the next turn's prompt, which begins with every token seen so far
    render_sft(messages)                    a whole conversation and which of its tokens are trained
    parse(completion)                       the message a completion stands for

Guarantee: for a conversation made by `render_prompt`, sampling and `extend`, the tokens that `render_sft` marks in
assistant turns are those that the engine would have sampled: no more (never the `<think>` wrapper that is part of the
prompt) and no fewer (the end token is included). Importing the library takes half a second, so only `build_renderer`
does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from stretto.base.errors import ConfigError
from stretto.chat.tokenizer import Tokenizer, is_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import RendererSection, ScratchSection
from stretto.config.sections.sft import LossMaskSection

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, Int32, Int64

Message = dict[str, Any]

STEP_LOSS_MASK = "step_loss_mask"
"""Key of a message in the data: 0 excludes the message from the loss."""
FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
    "llama": "llama-3",
    "glm4_moe": "glm-4.5",
    "glm_moe_dsa": "glm-5",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss",
    "nemotron_h": "nemotron-3",
    "laguna": "laguna-xs.2",
}


_SCRATCH_FAMILIES = get_args(ScratchSection.model_fields["family"].annotation)


class Renderer:
    """Messages <-> tokens for one tokenizer and one family of chat templates."""

    def __init__(self, tokenizer: Tokenizer, backend: Any, family: str):
        self.tokenizer = tokenizer
        self.family = family
        self._backend = backend
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(backend.get_stop_token_ids()))
        self._reply_prefix = self._find_reply_prefix()

    def render_prompt(
        self, messages: Sequence[Message], tools: list[Message] | None = None
    ) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of the conversation up to where the model's reply begins."""
        ids = self._backend.render_ids(list(messages), tools=tools, add_generation_prompt=True)
        return np.asarray(ids, np.int32)

    def render_leading(self, messages: Sequence[Message]) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of the first messages of a conversation, without the start of a reply."""
        return np.asarray(self._backend.render_ids(list(messages), add_generation_prompt=False), np.int32)

    def extend(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        new_messages: Sequence[Message],
        tools: list[Message] | None = None,
    ) -> Int32[np.ndarray, " tokens"] | None:
        """The next turn's prompt: every token so far, then the new messages (never the assistant's).

        A completion that was cut off is closed first. None if the template rewrites history here (it may drop old
        thinking): the caller must then render the whole conversation and start another branch.
        """
        bridged = self._backend.bridge_to_next_turn(
            [int(t) for t in prompt_ids], [int(t) for t in completion_ids], list(new_messages), tools=tools
        )
        return None if bridged is None else np.asarray(bridged.token_ids, np.int32)

    def text_owners(
        self,
        messages: Sequence[Message],
        tools: list[Message] | None = None,
        *,
        after: tuple[Int[np.ndarray, " prompt"], Int[np.ndarray, " completion"]] | None = None,
    ) -> Int64[np.ndarray, " tokens"]:
        """Index (int64) of the message whose text each prompt token is; -1 for all other tokens.

        The prompt is `render_prompt(messages)` or, with after = (prompt, completion), `extend(*after, messages)`; the
        tokens of `after` and of the template are -1.
        """
        if after is None:
            found = self._backend.render(list(messages), tools=tools, add_generation_prompt=True)
        else:
            prompt_ids, completion_ids = ([int(t) for t in ids] for ids in after)
            found = self._backend.bridge_to_next_turn(prompt_ids, completion_ids, list(messages), tools=tools)
        owners = np.asarray(found.message_indices, np.int64)
        is_text = np.asarray(found.is_content, bool)
        assert len(is_text) == len(owners) == len(found.token_ids), f"{self.family} attributes no tokens"
        return np.where(is_text, owners, -1)

    def render_sft(
        self, messages: Sequence[Message], loss_mask: LossMaskSection, tools: list[Message] | None = None
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids (int32) of a whole conversation, and which of them are trained (bool).

        Assistant turns train the tokens that the model samples, other roles in `loss_mask` the text of the message,
        and messages with `step_loss_mask` = 0 nothing.
        """
        plain = [{k: v for k, v in message.items() if k != STEP_LOSS_MASK} for message in messages]
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
            is_own = owners == i
            mask |= is_own & (is_sampled if role == "assistant" else is_text)
            if role == "assistant":
                mask[self._prefix_of_turn(ids, is_own)] = False
        return ids, mask

    def parse(
        self,
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None = None,
        tools: list[Message] | None = None,
    ) -> Message:
        """Parse a completion into the assistant's message: content, reasoning_content, tool_calls.

        `unparsed_tool_calls` holds the text of invalid calls; an environment can answer them.
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
        """Text of token ids; special tokens are decoded to their text."""
        return self.tokenizer.decode(token_ids)

    def _find_reply_prefix(self) -> Int32[np.ndarray, " prefix"]:
        """Tokens before every reply: the role header and, with thinking off, an empty thought."""
        messages = [{"role": "user", "content": "a"}]
        without = self._backend.render_ids(messages)
        with_prompt = self._backend.render_ids(messages, add_generation_prompt=True)
        return np.asarray(with_prompt[len(without) :], np.int32)

    def _prefix_of_turn(
        self, ids: Int32[np.ndarray, " tokens"], is_own: Bool[np.ndarray, " tokens"]
    ) -> slice:
        start = int(is_own.argmax())
        stop = start + len(self._reply_prefix)
        return slice(start, stop if np.array_equal(ids[start:stop], self._reply_prefix) else start)


def build_renderer(
    tokenizer: str | Path | Tokenizer, section: RendererSection | None = None, model_type: str | None = None
) -> Renderer:
    """Build the renderer of a tokenizer (a directory, or loaded) for the family in `section`.

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
            f'[renderer] name = "auto" knows no chat template for model_type {model_type!r}; '
            f"set name to one of {', '.join(sorted(set(FAMILY_OF_MODEL_TYPE.values())))}."
        )
    return Renderer(tokenizer, _build_backend(tokenizer, family, section.enable_thinking), family)


def _build_backend(tokenizer: Tokenizer, family: str, enable_thinking: bool) -> Any:
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
    if "enable_thinking" in renderers.template_field_names(config):
        config = type(config)(enable_thinking=enable_thinking)
    try:
        return renderers.create_renderer(tokenizer, config)
    except AssertionError as cause:
        raise ConfigError(
            f"[renderer] name = {family!r} does not fit {tokenizer.name_or_path}: {cause}"
        ) from cause
