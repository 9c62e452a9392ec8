"""Messages <-> tokens, so that exactly the sampled tokens are trained.

Hides how a model's messages are written. Chat messages in OpenAI's format go in, token ids come out:

    render_prompt(messages)                          the prompt that the engine continues
    extend(prompt, completion, history, messages)    the next turn's prompt, which begins with all earlier tokens
    render_sft(messages)                             a whole conversation, and which of its tokens are trained
    parse(completion)                                the message in a completion

Two backends do the work: the model's own chat template (template_backend.py), or a hand-written renderer of its family
(family_backend.py), which `build_renderer` takes only where both give the same tokens.

Guarantee: `render_sft` makes a conversation as a rollout would: by `render_prompt`, the tokens of a reply, and
`extend`. The tokens that it marks in assistant turns are exactly those that the engine would have sampled, end token
included, and they stand behind exactly the tokens that it would have seen. Where the template rewrites the history,
another example begins, as a rollout begins another branch; a reply that the template does not show as it is sampled is
left out.

Messages may have images (patches.py) if the model has an image processor. The prompt has one placeholder token per
token that the model makes of an image; `images_of` returns the pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stretto.base.errors import ConfigError, DataError
from stretto.chat.backend import Backend, Message, Rendered, Reply
from stretto.chat.choice import choose_backend
from stretto.chat.conversations import THINKING
from stretto.chat.patches import CONFIG_FILES, ImageProcessor
from stretto.chat.placeholders import PLACEHOLDER, VISION_TOKENS, one_per_image, repeats, with_placeholders
from stretto.chat.tokenizer import Tokenizer, load_tokenizer
from stretto.config.sections.model import RendererSection
from stretto.config.sections.sft import LossMaskSection
from stretto.data.pictures import image_parts
from stretto.records.images import Image, placeholder_spans

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, Int32, Int64

logger = logging.getLogger(__name__)

STEP_LOSS_MASK = "step_loss_mask"
"""Key of a message in the data: 0 excludes the message from the loss."""


class SftExample(NamedTuple):
    """A conversation, or the beginning of one, as tokens."""

    token_ids: Int32[np.ndarray, " tokens"]
    is_trained: Bool[np.ndarray, " tokens"]
    num_messages: int
    """Messages that it holds, from the first on."""


class SftRendering(NamedTuple):
    """What a conversation gives to train on."""

    examples: list[SftExample]
    num_left_out: int
    """Replies that the template does not show as the model would sample them."""
    why: str = ""
    """What is not shown of the first of these, and what to do."""


class Renderer:
    """Messages <-> tokens for one tokenizer and one way to write messages."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: Backend,
        images: ImageProcessor | None = None,
        *,
        keeps_special_text: bool = False,
        description: str = "",
        place: str = RendererSection.place,
    ):
        """keeps_special_text: the text of a special token in a message is text, and not that token.

        place: the path of the config's section, for messages.
        """
        self.tokenizer = tokenizer
        self.images = images
        self.image_token_id = None if images is None else tokenizer.token_id(PLACEHOLDER)
        self.name, self.description, self.place = backend.name, description, place
        self.num_special_in_text = 0
        """Texts of special tokens that messages had so far, those of the assistant left out."""
        self.stop_ids = backend.stop_ids
        self._backend, self._keeps_special_text = backend, keeps_special_text
        self._latest: tuple[Any, Any, Any] | None = None  # the last prompt: messages, tools, token ids

    def render_prompt(
        self, messages: Sequence[Message], tools: list[Message] | None = None
    ) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of the conversation, up to the start of the model's reply.

        The members of a group begin alike and one after the other, so the last prompt is remembered.
        """
        if (latest := self._latest) is not None and latest[:2] == (messages, tools):
            return latest[2].copy()
        num_special = self.num_special_in_text
        rendered = self._backend.render(self._plain(messages), tools, add_generation_prompt=True)
        ids = self._expanded(np.asarray(rendered.token_ids, np.int32), messages)
        is_plain = all(isinstance(value, str) for message in messages for value in message.values())
        if is_plain and tools is None and self.num_special_in_text == num_special:
            self._latest = [dict(message) for message in messages], None, ids.copy()
        return ids

    def render_text(self, messages: Sequence[Message], tools: list[Message] | None = None) -> str:
        """The conversation as text, up to the start of the model's reply."""
        return self.decode(self.render_prompt(messages, tools))

    def render_leading(
        self, messages: Sequence[Message], tools: list[Message] | None = None
    ) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of a conversation, or of its first messages, without the start of a reply."""
        rendered = self._backend.render(self._plain(messages), tools, add_generation_prompt=False)
        return self._expanded(np.asarray(rendered.token_ids, np.int32), messages)

    def refuse_rendered(self, messages: Sequence[Message], way: str) -> None:
        """Check that a user's first message is no conversation that the chat template has shown already.

        way: what to give in its place.

        Raises: DataError if its text begins with the special token with which the template begins a conversation.
        """
        first = messages[0] if messages else {}
        text = first.get("content")
        if first.get("role") != "user" or not isinstance(text, str) or self._keeps_special_text:
            return
        mark = self._first_mark
        if mark and text.startswith(mark):
            raise DataError(
                f"the prompt begins with {mark!r}, as the chat template begins a conversation: it is rendered text, "
                f"which the template would show once more; {way}"
            )

    @cached_property
    def _first_mark(self) -> str:
        """The special token with which the template begins a conversation; "" if there is none."""
        ids = self._backend.render([{"role": "user", "content": "a"}], None, add_generation_prompt=True).token_ids
        mark = self.tokenizer.token_text(ids[0])
        return mark if mark in self.tokenizer.special_tokens else ""

    @cached_property
    def branching(self) -> str:
        """What to know where each turn of a user begins another branch, and what to do; "" if none does."""
        try:
            lost, way = self._lost_later()
        except DataError:  # it takes no such conversation
            return ""
        return lost and (
            f"{self.name} shows earlier replies {lost} once the user speaks again: each reply to a user is trained as "
            f"a sample of its own, so that tokens grow with the square of these turns. {way}; use the policy that "
            "way, too"
        )

    def _lost_later(self) -> tuple[str, str]:
        """How a reply is shown once the user speaks again, and what keeps one branch; both "" if as it was sampled."""
        asked, reply, later = THINKING[:1], THINKING[1], THINKING[2:]
        sampled, lost = self._backend.reply(asked, reply, None), "without their thoughts"
        if sampled is None or sampled.prompt_ids is not None:  # no thoughts, or only in the other mode
            reply = {key: value for key, value in reply.items() if key != "reasoning_content"}
            sampled, lost = self._backend.reply(asked, reply, None), "otherwise than they were sampled"
        if sampled is None or sampled.prompt_ids is not None:
            return "", ""
        prompt = self._backend.render(asked, None, add_generation_prompt=True).token_ids
        tried = (sampled.token_ids, sampled.token_ids[:-1])
        goes_on = [self._backend.bridge(prompt, ids, [*asked, reply], later, None) is not None for ids in tried]
        if goes_on[0]:
            return "", ""
        if goes_on[1]:
            template = f'{self.place}.template = "chatml"'
            return "without the token that ends them", f"A template that shows it, such as {template}, keeps one branch"
        setting = f'{self.place}.settings.thinking_retention = "all"'
        return lost, f"The renderer of the model's family, if it has one, keeps one branch with {setting}"

    def images_of(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        """The images of a conversation with their patches, in the order of their placeholders.

        Raises: DataError for an image that cannot be read; ConfigError if the model takes text only.
        """
        return tuple(self._processor(where).image(part, where) for part, where in image_parts(messages))

    def last_cut(self, token_ids: Int[np.ndarray, " tokens"], images: Sequence[Image], max_tokens: int) -> int:
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
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: list[Message] | None = None,
    ) -> Int32[np.ndarray, " tokens"] | None:
        """The next turn's prompt: all earlier tokens, then the new messages (none of the assistant's).

        history: the messages of the prompt, and the completion's as `parse` gave it. A truncated completion is closed
        first. None if the template rewrites the history here (it may drop old thinking): the caller must then render
        the whole conversation and start another branch.
        """
        new = self._plain(new_messages)
        if self.image_token_id is None:
            between = self._backend.between(prompt_ids, completion_ids, history, new, tools)
            if between is not None:
                return np.concatenate((prompt_ids, completion_ids, between), dtype=np.int32, casting="unsafe")
        bridged = self._bridge(prompt_ids, completion_ids, history, new, tools)
        if bridged is None:
            return None
        return self._expanded(np.asarray(bridged.token_ids, np.int32), new_messages, after=(prompt_ids, completion_ids))

    def text_owners(
        self,
        messages: Sequence[Message],
        tools: list[Message] | None = None,
        *,
        after: tuple[Int[np.ndarray, " prompt"], Int[np.ndarray, " completion"], Sequence[Message]] | None = None,
    ) -> Int64[np.ndarray, " tokens"]:
        """Index (int64) of the message to whose text each prompt token belongs; -1 for other tokens.

        The prompt is `render_prompt(messages)` or, with after = (prompt, completion, history), `extend(*after,
        messages)`; the tokens of `after` and of the template are -1.
        """
        if after is None:
            plain = self._plain(messages, is_counted=False)
            rendered = self._backend.render(plain, tools, add_generation_prompt=True, has_owners=True)
        else:
            bridged = self._bridge(*after, self._plain(messages, is_counted=False), tools, has_owners=True)
            assert bridged is not None, "text_owners is asked about a prompt that `extend` made"
            rendered = bridged
        return self._expanded_owners(rendered, messages, None if after is None else after[:2])

    def render_sft(
        self, messages: Sequence[Message], loss_mask: LossMaskSection, tools: list[Message] | None = None
    ) -> SftRendering:
        """A whole conversation as a rollout would make it: one example, or one per branch.

        Assistant turns train the tokens that the model samples, other roles in `loss_mask` the text of the message,
        and messages with `step_loss_mask` = 0 nothing.

        Raises: DataError for a conversation that the template refuses.
        """
        plain = [{k: v for k, v in message.items() if k != STEP_LOSS_MASK} for message in messages]
        is_wanted = [
            bool(getattr(loss_mask, message["role"], False)) and message.get(STEP_LOSS_MASK) != 0
            for message in messages
        ]
        found = SftRendering([], 0)
        turn: tuple[Any, Any, int] | None = None  # prompt and reply, and the messages that they hold
        mask = np.zeros(0, bool)
        num_seen = 0  # messages whose text was trained, or need not be
        for index, message in enumerate(plain):
            if message["role"] != "assistant":
                continue
            reply = self._backend.reply(self._plain(plain[:index], is_counted=False), message, tools)
            if reply is None or not set(self.stop_ids).isdisjoint(reply.token_ids[:-1]):  # it would have ended there
                why = found.why or self._why_left_out(plain, index, tools)
                found = found._replace(num_left_out=found.num_left_out + is_wanted[index], why=why)
                continue
            if reply.prompt_ids is None:
                prompt, is_new = self._next_prompt(plain, index, turn, tools)
            else:
                prompt, is_new = self._expanded(np.asarray(reply.prompt_ids, np.int32), plain[:index]), True
            if is_new and turn is not None:
                found.examples.append(SftExample(np.concatenate(turn[:2]), mask, turn[2]))
            kept = np.zeros(0, bool) if is_new else mask
            mask = np.concatenate([kept, np.zeros(len(prompt) - len(kept), bool)])
            before = None if is_new else turn
            mask |= self._text_mask(plain, index, before, tools, is_wanted, num_seen, len(prompt), reply)
            num_seen = index + 1
            ids, is_sampled = np.asarray(reply.token_ids, np.int32), np.asarray(reply.is_trained, bool)
            mask = np.concatenate([mask, is_sampled & is_wanted[index]])
            turn = (prompt, ids, index + 1)
        return self._last_example(plain, turn, mask, tools, is_wanted, num_seen, found)

    def parse(
        self,
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None = None,
        tools: list[Message] | None = None,
    ) -> Message:
        """Parse a completion into the assistant's message: content, reasoning_content, tool_calls.

        `unparsed_tool_calls` has the text of invalid calls; an environment can answer them.
        """
        parsed = self._backend.parse(_as_list(completion_ids), prompt_ids, tools)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        calls = [call for call in parsed.calls if call.name is not None]
        if calls:
            message["tool_calls"] = [
                ({} if call.id is None else {"id": call.id})
                | {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        if broken := [call.raw for call in parsed.calls if call.name is None]:
            message["unparsed_tool_calls"] = broken
        return message

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Token ids (int32) of a text, without special tokens around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, token_ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> str:
        """Text of token ids, with the text of special tokens."""
        return self.tokenizer.decode(token_ids)

    def _why_left_out(self, messages: Sequence[Message], index: int, tools: list[Message] | None) -> str:
        """What of a reply the template does not show, and what to do."""
        history, reply = self._plain(messages[:index], is_counted=False), messages[index]
        content = reply.get("content")
        parts = [*(content if isinstance(content, list) else [content]), reply.get("reasoning_content")]
        said = " ".join(map(_part_text, parts))
        if end := next((text for text in map(self.tokenizer.token_text, self.stop_ids) if text and text in said), ""):
            return f"message {index} has the text {end!r}, with which a sampled reply would end; write it otherwise"
        if index == 0:
            return f"{self.name} does not show message 0 without a prompt: put a message of the user before the reply"
        without = {key: value for key, value in reply.items() if key != "reasoning_content"}
        if reply.get("reasoning_content") and self._backend.reply(history, without, tools) is not None:
            return (
                f"{self.name} does not show the thought of message {index} (`reasoning_content`): write it into the "
                f"content, between the tags that the model is to learn, or give a template that shows thoughts as "
                f"{self.place}.template"
            )
        return f"{self.name} does not show message {index} as the model would sample it behind its prompt"

    def _next_prompt(
        self, messages: Sequence[Message], index: int, turn: tuple[Any, Any, int] | None, tools: list[Message] | None
    ) -> tuple[Int32[np.ndarray, " tokens"], bool]:
        """The prompt of reply `index`, and whether it begins another example."""
        if turn is not None:
            prompt_ids, reply_ids, num_held = turn
            history, new = messages[:num_held], messages[num_held:index]
            if (extended := self.extend(prompt_ids, reply_ids, history, new, tools)) is not None:
                return extended, False
        return self.render_prompt(messages[:index], tools), True

    def _text_mask(
        self,
        messages: Sequence[Message],
        end: int,
        turn: tuple[Any, Any, int] | None,
        tools: list[Message] | None,
        is_wanted: list[bool],
        num_seen: int,
        num_tokens: int,
        reply: Reply | None = None,
    ) -> Bool[np.ndarray, " tokens"]:
        """The tokens of wanted messages in [num_seen, end) that are not the assistant's, in the prompt before `end`."""
        first = 0 if turn is None else turn[2]
        wanted = [i for i in range(num_seen, end) if is_wanted[i] and messages[i]["role"] != "assistant"]
        if not wanted:
            return np.zeros(num_tokens, bool)
        if reply is not None and reply.prompt_ids is not None:  # the prompt of another mode
            rendered = Rendered(reply.prompt_ids, reply.prompt_owners)
            return np.isin(self._expanded_owners(rendered, messages[:end]), wanted)
        after = None if turn is None else (*turn[:2], messages[:first])
        owners = self.text_owners(messages[first:end], tools, after=after)
        return np.isin(owners, [i - first for i in wanted])

    def _last_example(
        self,
        messages: Sequence[Message],
        turn: tuple[Any, Any, int] | None,
        mask: Bool[np.ndarray, " tokens"],
        tools: list[Message] | None,
        is_wanted: list[bool],
        num_seen: int,
        found: SftRendering,
    ) -> SftRendering:
        """The examples with the last one, which ends with the last reply or with wanted messages behind it."""
        end, is_new = len(messages), turn is None
        if any(w and m["role"] != "assistant" for w, m in zip(is_wanted[num_seen:], messages[num_seen:])):
            if turn is None or messages[-1]["role"] == "assistant":
                prompt, is_new = self.render_prompt(messages, tools), True
            else:
                prompt, is_new = self._next_prompt(messages, end, turn, tools)
            texts = self._text_mask(messages, end, None if is_new else turn, tools, is_wanted, num_seen, len(prompt))
            if is_new and turn is not None:
                found.examples.append(SftExample(np.concatenate(turn[:2]), mask, turn[2]))
            if not is_new:
                texts[: len(mask)] |= mask
            found.examples.append(SftExample(prompt, texts, end))
        elif turn is not None:
            found.examples.append(SftExample(np.concatenate(turn[:2]), mask, turn[2]))
        return found

    def _plain(self, messages: Sequence[Message], *, is_counted: bool = True) -> list[Message]:
        """The messages as templates take them, with text only.

        Raises: ConfigError for an image if the model takes text only.
        """
        for _, where in image_parts(messages):
            self._processor(where)
        return [self._guarded(message, is_counted) for message in with_placeholders(messages)]

    def _guarded(self, message: Message, is_counted: bool) -> Message:
        """The message; texts of special tokens in it are counted, and stay text if that is set."""
        content = message.get("content")
        is_text = isinstance(content, str | list)
        if message.get("role") == "assistant" or not is_text or self._backend.keeps_special_text:
            return message
        parts = content if isinstance(content, list) else [content]
        texts = [_part_text(part) for part in parts]
        if not any(map(self.tokenizer.has_special_text, texts)):
            return message
        placeholders = () if self.images is None else VISION_TOKENS
        specials = (t for t in self.tokenizer.special_tokens if t not in placeholders)
        found = [token for token in specials if any(token in text for text in texts)]
        if not found:
            return message
        if is_counted:
            self._count_special(message, found)
        if not self._keeps_special_text:
            return message
        kept = [self.tokenizer.as_text(text, found) for text in texts]
        if isinstance(content, str):
            return message | {"content": kept[0]}
        return message | {"content": [_with_text(part, text) for part, text in zip(parts, kept)]}

    def _count_special(self, message: Message, found: list[str]) -> None:
        before = self.num_special_in_text
        self.num_special_in_text += len(found)
        if len(str(before)) < len(str(self.num_special_in_text)) or before == 0:
            kept = "kept as text" if self._keeps_special_text else (
                f'taken as that token: set {self.place}.special_tokens_in_text = "text" to keep it text'
            )  # fmt: skip
            logger.warning(
                "a message of the role %r has the text of the special token %r, which is %s (%d such texts so far)",
                message.get("role"), found[0], kept, self.num_special_in_text,
            )  # fmt: skip

    def _bridge(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        history: Sequence[Message],
        messages: Sequence[Message],
        tools: list[Message] | None,
        *,
        has_owners: bool = False,
    ) -> Rendered | None:
        """The next prompt by the backend; messages as `_plain` gives them."""
        before = _as_list(prompt_ids), _as_list(completion_ids)
        past = self._plain(history, is_counted=False) if self._backend.reads_history else history
        return self._backend.bridge(*before, past, messages, tools, has_owners=has_owners)

    def _expanded(
        self, ids: Int32[np.ndarray, " rendered"], messages: Sequence[Message], after: tuple[Any, Any] | None = None
    ) -> Int32[np.ndarray, " tokens"]:
        """Rendered tokens with each placeholder repeated, as `_repeats` counts."""
        return ids if self.image_token_id is None else np.repeat(ids, self._repeats(ids, messages, after))

    def _repeats(
        self, ids: Int32[np.ndarray, " rendered"], messages: Sequence[Message], after: tuple[Any, Any] | None = None
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

    def _expanded_owners(
        self, rendered: Rendered, messages: Sequence[Message], after: tuple[Any, Any] | None = None
    ) -> Int64[np.ndarray, " tokens"]:
        """The owners of rendered tokens with each placeholder repeated; placeholders belong to no text."""
        ids, owners = np.asarray(rendered.token_ids, np.int32), np.asarray(rendered.owners, np.int64)
        is_image = np.zeros(len(ids), bool) if self.image_token_id is None else ids == self.image_token_id
        return np.repeat(np.where(is_image, -1, owners), self._repeats(ids, messages, after))

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


def _as_list(token_ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else [int(t) for t in token_ids]


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _with_text(part: Any, text: str) -> Any:
    if isinstance(part, dict):
        return part | {"text": text} if "text" in part else part
    return text if isinstance(part, str) else part


def build_renderer(
    tokenizer: str | Path | Tokenizer,
    section: RendererSection | None = None,
    model_type: str | None = None,
    images: ImageProcessor | None = None,
) -> Renderer:
    """Build the renderer of a tokenizer (a directory, or loaded), as `section` says (choice.py).

    images: the model's image processor; None if the model takes text only.

    Raises: ConfigError if nothing fits.
    """
    section = section or RendererSection()
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    if images is not None and tokenizer.token_id(PLACEHOLDER) is None:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the model has an image processor, but its tokenizer has no {PLACEHOLDER!r}; "
            "only the tokens of the Qwen-VL families are supported."
        )
    image_token_id = None if images is None else tokenizer.token_id(PLACEHOLDER)
    choice = choose_backend(tokenizer, section, model_type, image_token_id)
    return Renderer(
        tokenizer,
        choice.backend,
        images,
        keeps_special_text=section.special_tokens_in_text == "text",
        description=choice.description,
        place=section.place,
    )
