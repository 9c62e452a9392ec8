"""Messages <-> tokens by a model's own chat template.

A template gives text, so that what it adds behind a reply is found by rendering the conversation with and without new
messages. Sampled tokens are kept, never encoded again. The conversation is extended only if the template still shows
everything before as it was: where it drops a thought, moves the system message or writes another date, `bridge` returns
None, and the caller renders the whole conversation as another branch.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stretto.base.errors import ConfigError, DataError
from stretto.chat.backend import Message, Parsed, Rendered, Reply, Shown, import_library, one_call, read_by_library
from stretto.chat.conversations import CALL, TOOL
from stretto.chat.marks import owners_of, unmarked, with_marks
from stretto.chat.template_traits import Thinking, as_parts, attempt, find_traits, with_arguments
from stretto.chat.templates import ChatTemplate
from stretto.chat.tokenizer import Tokenizer
from stretto.chat.tool_calls import ALIASES, FORMAT_MARKS, FORMATS, LAST_TOKENS, LIBRARY_FORMATS, TEXT_FORMATS, UNMARKED

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int

logger = logging.getLogger(__name__)

_MAX_TAIL = 64
"""Characters of a prompt behind which a reply is encoded."""
_MAX_KNOWN = 2**16
"""Prompts whose text is remembered, as two hashes each."""


class TemplateBackend:
    """One chat template over one tokenizer."""

    reads_history = True
    keeps_special_text = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        tool_parser: str = "auto",
        image_token_id: int | None = None,
        name: str | None = None,
        is_bare: bool = False,
    ) -> None:
        """tool_parser: one of FORMATS, "none", or "auto" for the one that reads the template's own calls.

        name: what messages call it. is_bare: the template puts nothing between messages, so that each is encoded on its
        own: no token belongs to two of them.

        Raises: ConfigError for a format that there is not; DataError for a template that shows no message.
        """
        self.name = name or f"the chat template of {template.where}"
        self._other_mode = template.in_other_mode()
        self.template, self._tokenizer, self._image_token_id = template, tokenizer, image_token_id
        self._is_bare = is_bare
        self.traits = find_traits(template)
        self.end_id = self._find_end()
        own = () if self.end_id is None else (self.end_id,)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *tokenizer.eos_ids)))
        self._anchor = next((t for t, is_plain in tokenizer.special_tokens.items() if is_plain), None)
        self._inner = self._find_inner()
        self._shown = Shown(self.name, template.place, tools=self.traits.shows_tools, write=self._attempt)
        self._known: dict[bytes, bytes] = {}  # digests of prompts -> digests of their texts
        self.thinking = self.traits.thinking
        self.tool_format = self._find_format(tool_parser)
        self._add_end_of_calls()

    @property
    def spelled_end(self) -> str:
        """What the template writes behind a reply, if none of it is a token of its own; "" if it is."""
        return self.traits.end_text.strip() if self.traits.ends_replies and self.end_id is None else ""

    # -- messages to tokens --

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        add_generation_prompt: bool,
        has_owners: bool = False,
    ) -> Rendered:
        text = self._text(messages, tools, add_generation_prompt)
        if has_owners:
            spans = self._spans(messages, tools, add_generation_prompt, text)
            ids, offsets = self._encode_behind("", text, self._borders(messages))
            return Rendered(ids, owners_of(offsets, spans, text))
        ids = self._encode(text, messages)
        if add_generation_prompt:
            self._remember(ids, text)
        return Rendered(ids)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        history: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        has_owners: bool = False,
    ) -> Rendered | None:
        if any(message["role"] == "assistant" for message in messages):
            return None
        asked = self._text(history[:-1], tools, True)
        if not self._shows(prompt_ids, asked, history[:-1]):
            return None
        shown = self._text(history, tools, False)
        everything = [*history, *messages]
        now = self._text(everything, tools, True)
        if not shown.startswith(asked):
            return None
        body, shown_end = self._split_end(shown[len(asked) :])
        said, end = self._split_stop(completion_ids)
        if end is not None and len(said) + 1 < len(completion_ids):
            return None  # tokens behind the end, which the template cannot show
        stem = asked + body
        if not now.startswith(stem) or not self._says(completion_ids, body, shown_end, asked, tools):
            return None
        end_text = "" if end is None else self._tokenizer.token_text(end)
        if not now.startswith(end_text, len(stem)):
            return None
        start = len(stem) + len(end_text)
        borders = [border - start for border in self._borders(everything) if border > start]
        added, offsets = self._encode_behind(end_text or stem, now[start:], borders)
        token_ids = [*prompt_ids, *completion_ids, *added]
        self._remember(token_ids, now)
        if not has_owners:
            return Rendered(token_ids)
        spans = [
            (index - len(history), left - start, right - start)
            for index, left, right in self._spans(everything, tools, True, now)
            if index >= len(history)
        ]
        return Rendered(token_ids, [-1] * (len(token_ids) - len(added)) + owners_of(offsets, spans, now[start:]))

    def between(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        history: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> Sequence[int] | None:
        return None

    def reply(self, history: Sequence[Message], reply: Message, tools: Sequence[Message] | None) -> Reply | None:
        try:
            asked = self._text(history, tools, True)
            shown = self._text([*history, reply], tools, False)
        except DataError:
            if history:
                raise
            return None  # many templates need a first message before a reply
        if shown.startswith(asked) and self._shows_reply(shown[len(asked) :], reply):
            return Reply(*self._shown_reply(asked, shown, [*history, reply], tools))
        # The template shows the history otherwise behind a reply, which is sampled behind the prompt all the same.
        lead = asked.removeprefix(self._text(history, tools, False)) if history else ""
        if lead and lead in shown and not self.template.marks_replies(tools):
            tail = shown.rpartition(lead)[2]
            if self._shows_reply(tail, reply):
                return Reply(*self._shown_reply(asked, asked + tail, [*history, reply], tools))
        if self._other_mode is not None:
            mode, messages = self._other_mode, self._prepared([*history, reply])
            other = mode.render(messages[:-1], tools, add_generation_prompt=True)
            shown = mode.render(messages, tools)
            if shown.startswith(other) and self._shows_reply(shown[len(other) :], reply):
                ids, is_trained = self._shown_reply(other, shown, [*history, reply], tools)
                spans = self._spans(history, tools, True, other, mode)
                prompt = self._tokenizer(other)
                owners = owners_of(prompt["offset_mapping"], spans, other)
                return Reply(ids, is_trained, prompt["input_ids"], owners)
        if (text := self._reply_with_thought(asked, reply)) is None:
            return None
        ids = self._encode_after(asked, text)[0]
        return Reply(ids, [True] * len(ids))

    def _shown_reply(
        self, asked: str, shown: str, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[list[int], list[bool]]:
        """The tokens of the last message as the template shows it, and which are trained."""
        body, end = self._split_end(shown[len(asked) :])
        eos = next(iter(self._stop_texts), "")
        ids, offsets = self._encode_after(asked, body + (end or eos))
        if not self.template.marks_replies(tools):
            return ids, [True] * len(ids)
        marked, spans = self.template.render_marked(self._prepared(messages), tools)
        if marked != shown:
            raise DataError(f"{self.name}: its text changes where {{% generation %}} blocks are marked")
        inside = [(0, left - len(asked), right - len(asked)) for left, right in spans]
        return ids, [owner == 0 for owner in owners_of(offsets, inside)]

    # -- tokens to messages --

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None,
        tools: Sequence[Message] | None,
    ) -> Parsed:
        tail = None if prompt_ids is None else self._tokenizer.decode(list(prompt_ids[-32:]))
        return self._parse(completion_ids, tail, tools)[0]

    def _parse(self, ids: Sequence[int], prompt: str | None, tools: Sequence[Message] | None) -> tuple[Parsed, bool]:
        """What the tokens of a reply say, and whether they end within a thought.

        Calls behind the first are malformed where the template refuses them, or would not show them.
        """
        said, is_open = self._read(ids, prompt, tools)
        return said if self.traits.shows_many_calls else one_call(said), is_open

    def _read(self, ids: Sequence[int], prompt: str | None, tools: Sequence[Message] | None) -> tuple[Parsed, bool]:
        if self.tool_format in LIBRARY_FORMATS:
            return self._parse_by_library(self.tool_format, ids, prompt, tools), False
        text, thinking = self._decode_after(self._split_stop(ids)[0]), self.thinking
        before, behind = self.traits.around
        if thinking is None or thinking.close not in before:
            text = text.removeprefix(before)
        text = text.removesuffix(behind)
        reasoning: str | None = None
        if thinking is not None:
            is_open = prompt is not None and prompt.rstrip().endswith(thinking.open)
            if prompt is None and thinking.close in text:
                is_open = thinking.open not in text.partition(thinking.close)[0]
            reasoning, text, is_unclosed = split_thought(text, thinking, is_open)
            if is_unclosed:
                return Parsed("", reasoning), True
        if self.tool_format is None or (self.tool_format in UNMARKED and not tools):
            return Parsed(text, reasoning), False
        content, calls = TEXT_FORMATS[self.tool_format](text)
        # Where the template shows no calls, they stay in the content, or the next turn would not have them.
        return Parsed(content if calls and self.traits.shows_calls else text, reasoning, calls), False

    def _parse_by_library(
        self, name: str, ids: Sequence[int], prompt: str | None, tools: Sequence[Message] | None
    ) -> Parsed:
        parsing = import_library("renderers.parsing")
        function, tokens = LIBRARY_FORMATS[name]
        arguments: dict[str, Any] = {key: self._tokenizer.token_id(token) for key, token in tokens.items()}
        before: list[int] = []
        if name == "gpt-oss":  # a header that the prompt has begun
            before = self._tokenizer.encode("<|start|>assistant")
        else:
            is_open = prompt is not None and prompt.rstrip().endswith("<think>")
            arguments |= {"stop_ids": set(self.stop_ids), "prefilled_thinking": is_open}
        if name in ("glm", "minimax-m2"):
            arguments["tools"] = tools
        read = getattr(parsing, function)
        return read_by_library(
            lambda: read(self._tokenizer, [*before, *map(int, ids)], **arguments),
            lambda: self._decode_after(self._split_stop(ids)[0]),
        )

    # -- text --

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] | None, is_asked: bool) -> str:
        self._shown.check_tools(tools)
        for message in messages:
            self._check_calls(message)
            self._check_role(message)
        self._shown.check(messages, tools)
        return self.template.render(self._prepared(messages), tools, add_generation_prompt=is_asked)

    def _attempt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str | None:
        return attempt(self.template, self._prepared(messages), tools, add_generation_prompt=True)

    def _check_role(self, message: Message) -> None:
        if message["role"] in self.traits.hidden_roles:
            raise DataError(
                f"{self.name} drops messages of the role {message['role']!r}; leave them out, or give another template "
                f"as {self.template.place}.template"
            )

    def _check_calls(self, message: Message) -> None:
        if self.traits.shows_calls or not (calls := message.get("tool_calls")):
            return
        names = [str(call.get("function", {}).get("name")) for call in calls]
        if not all(name in str(message.get("content") or "") for name in names):
            raise DataError(
                f"{self.name} shows no tool calls, so that the call of {names[0]!r} would be lost: write it in the "
                f'content, or give a template that shows calls, such as {self.template.place}.template = "chatml"'
            )

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that this template takes."""
        numbers = itertools.count()
        pending: list[tuple[Any, str]] = []
        return [self._prepared_one(message, numbers, pending) for message in messages]

    def _prepared_one(self, message: Message, numbers: itertools.count[int], pending: list[tuple[Any, str]]) -> Message:
        """pending: calls that have no result yet, by the ids that they had and have."""
        ready = {key: value for key, value in message.items() if key != "unparsed_tool_calls"}
        content = ready.get("content")
        if isinstance(content, list) and all(is_text(part) for part in content):
            ready["content"] = "".join(part if isinstance(part, str) else part["text"] for part in content)
        if "content" not in ready or (content is None and not ready.get("tool_calls")):
            ready["content"] = ""
        if calls := ready.get("tool_calls"):
            calls = [with_arguments(call, self.traits.arguments_as_text) for call in calls]
            if self.traits.call_id is not None:
                named = [c if self._is_named(c) else c | {"id": self._call_id(c, next(numbers))} for c in calls]
                pending[:] = [(call.get("id"), new["id"]) for call, new in zip(calls, named)]
                calls = named
            ready["tool_calls"] = calls
            if not ready["content"]:
                ready["content"] = self.traits.empty_content
        elif "tool_calls" in ready:
            del ready["tool_calls"]
        self._name_thought(ready)
        if ready["role"] == "tool" and pending and self.traits.call_id is not None:
            own = ready.get("tool_call_id")
            answered = next((each for each in pending if each[0] == own), pending[0])
            if own is None or own == answered[0]:
                ready["tool_call_id"] = answered[1]
            pending.remove(answered)
        return as_parts(ready) if self.traits.takes_parts else ready

    def _name_thought(self, ready: Message) -> None:
        """Give the thought of a reply the key under which the template looks for it."""
        key, thought = self.traits.thought_key, ready.get("reasoning_content")
        if key == "reasoning_content" or not thought:
            return
        if self.traits.shows_all_beside_calls or not (ready.get("tool_calls") and ready["content"]):
            ready[key] = thought

    def _is_named(self, call: Message) -> bool:
        """Whether a call has an id as the template takes it; Kimi's has the name of the function."""
        own = call.get("id")
        return bool(own) and (not self._ids_are_names or str(call["function"].get("name")) in str(own))

    @property
    def _ids_are_names(self) -> bool:
        return (self.traits.call_id or "").startswith("functions.")

    def _call_id(self, call: Message, number: int) -> str:
        if self._ids_are_names:
            return f"functions.{call['function']['name']}:{number}"
        return f"call{number:05d}"

    def _spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        is_asked: bool,
        text: str,
        template: ChatTemplate | None = None,
    ) -> list[tuple[int, int, int]]:
        """Message, first and last character of each message's text in the rendered text."""
        template, prepared = template or self.template, self._prepared(messages)
        for has_blanks in (True, False):  # a template may cut the blanks around a text
            marked = attempt(template, with_marks(prepared, has_blanks), tools, add_generation_prompt=is_asked)
            plain, spans = unmarked(marked or "")
            if plain == text:
                return spans
        raise DataError(
            f"{self.name}: the text of single messages cannot be told from the template's; train replies alone, or "
            f"give another template as {self.template.place}.template"
        )

    # -- one reply --

    def _says(self, ids: Sequence[int], body: str, end: str, asked: str, tools: Sequence[Message] | None) -> bool:
        """Whether the template shows a reply with the content, the thought and the calls that were sampled."""
        if self._decode_after(self._split_stop(ids)[0]) == body:
            return True
        said, is_open = self._parse(ids, asked, tools)
        shown, _ = self._parse(self._encode_after(asked, body + end)[0], asked, tools)
        return not is_open and _meaning(said) == _meaning(shown)

    def _shows_reply(self, text: str, reply: Message) -> bool:
        """Whether the text of a reply has its thought, then its content, and all its calls."""
        text = "".join(self._split_end(text))  # the engine samples nothing behind the end
        content, thinking = _text_of(reply.get("content")), self.thinking
        thought = (reply.get("reasoning_content") or "").strip()
        if not thought and thinking is not None:
            thought, content, _ = split_thought(content, thinking, thinking.close in content)
            thought = (thought or "").strip()
        if thought:
            _, found, text = text.partition(thought)
            is_closed = thinking is None or thinking.close in text or reply.get("tool_calls")
            if not found or not is_closed:  # gpt-oss closes a thought before a call otherwise
                return False
        calls = Counter(str(call["function"].get("name")) for call in reply.get("tool_calls") or ())
        return content.strip() in text and all(text.count(name) >= n for name, n in calls.items())

    def _reply_with_thought(self, asked: str, reply: Message) -> str | None:
        """The reply to a prompt that begins the thought, if the template drops the thoughts of replies."""
        thinking, content = self.thinking, reply.get("content") or ""
        is_closed = thinking is not None and asked.rstrip().endswith(thinking.close)
        if thinking is None or is_closed or reply.get("tool_calls") or not isinstance(content, str):
            return None
        reasoning = reply.get("reasoning_content")
        if reasoning is None and thinking.close in content:
            reasoning, content, _ = split_thought(content, thinking, True)
        if not reasoning:
            return None
        begins = "" if asked.rstrip().endswith(thinking.open) else thinking.before
        end = next(iter(self._stop_texts), "")
        return f"{begins}{reasoning.strip()}{thinking.after}{content.strip()}{end}"

    @property
    def _stop_texts(self) -> list[str]:
        """The texts of the end tokens; a model may have some that its tokenizer lacks."""
        return [text for text in map(self._tokenizer.token_text, self.stop_ids) if text]

    def _split_end(self, text: str) -> tuple[str, str]:
        """A reply as it is shown: its text, and the text of its end token."""
        at, end = min(((text.find(s), s) for s in self._stop_texts if s in text), default=(-1, ""))
        return (text[:at], end) if at >= 0 else (text.rstrip(), "")

    def _split_stop(self, ids: Sequence[int]) -> tuple[list[int], int | None]:
        """The tokens of a reply up to its end, and the token that ended it; None if it was cut."""
        for number, token in enumerate(ids):
            if int(token) in self.stop_ids:
                return [int(t) for t in ids[:number]], int(token)
        return [int(t) for t in ids], None

    # -- the tokenizer --

    def _borders(self, messages: Sequence[Message]) -> list[int]:
        """The characters of the text at which one message ends and the next begins, if each is encoded on its own."""
        if not self._is_bare:
            return []
        lengths = (len(message["content"]) for message in self._prepared(messages[:-1]))
        start = len(self.template.render([]))
        return list(itertools.accumulate(lengths, initial=start))[1:]

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation's text."""
        if not self._is_bare or len(messages) < 2:
            return self._tokenizer.encode(text)
        return self._encode_behind("", text, self._borders(messages))[0]

    def _encode_behind(self, before: str, text: str, borders: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """As `_encode_after`, of a text in pieces that end at these characters of it."""
        whole = before[-_MAX_TAIL:] + text
        num_before = len(whole) - len(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in itertools.pairwise(sorted({0, *borders, len(text)})):
            at = num_before + start
            piece, found = self._encode_after(whole[max(0, at - _MAX_TAIL) : at], text[start:end])
            ids += piece
            offsets += [(left + start, right + start) for left, right in found]
        return ids, offsets

    def _encode_after(self, before: str, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens and character offsets of a text that stands behind another.

        Some tokenizers write a blank at the start of a text, some behind special tokens too, so it is encoded behind
        the end of the other; where a token would cross the border, behind a text with which it does not merge.
        """
        tail = before[-_MAX_TAIL:]
        start = max((tail.rfind(token) for token in self._tokenizer.special_tokens), default=-1)
        for anchor in (tail[max(start, 0) :], self._inner, self._anchor or "", ""):
            known = self._tokenizer.encode(anchor) if anchor else []
            encoded = self._tokenizer(anchor + text)
            if (anchor or not before) and encoded["input_ids"][: len(known)] == known:
                break
        offsets = [(left - len(anchor), right - len(anchor)) for left, right in encoded["offset_mapping"]]
        return encoded["input_ids"][len(known) :], offsets[len(known) :]

    def _find_inner(self) -> str:
        """A text behind which another is encoded as in the middle of a text: without a blank before it."""
        for anchor in (*([self._anchor] if self._anchor else []), "\n"):
            known, ids = self._tokenizer.encode(anchor), self._tokenizer.encode(anchor + "a")
            if ids[: len(known)] == known and self._tokenizer.decode(ids).endswith(anchor + "a"):
                return anchor
        return self._anchor or ""

    def _decode_after(self, ids: Sequence[int]) -> str:
        """The text of tokens that stand behind others, with a blank that they begin with."""
        if self._anchor is None:
            return self._tokenizer.decode(ids)
        anchor = self._tokenizer.encode(self._anchor)
        return self._tokenizer.decode([*anchor, *ids]).removeprefix(self._tokenizer.decode(anchor))

    def _remember(self, ids: Sequence[int], text: str) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)
        self._known[self._key(ids)] = _digest(text.encode("utf-8", "surrogatepass"))

    def _shows(self, ids: Sequence[int], text: str, messages: Sequence[Message]) -> bool:
        """Whether a prompt was made from this text, that of these messages."""
        known = self._known.get(self._key(ids))
        if known is not None:
            return known == _digest(text.encode("utf-8", "surrogatepass"))
        return self._collapsed(ids) == self._collapsed(self._encode(text, messages))

    def _key(self, ids: Sequence[int]) -> bytes:
        return _digest(array("q", self._collapsed(ids)).tobytes())

    def _collapsed(self, ids: Sequence[int]) -> list[int]:
        """The tokens with one placeholder per image."""
        if self._image_token_id is None:
            return [int(token) for token in ids]
        image = self._image_token_id
        kept = [token for token, after in itertools.zip_longest(ids, ids[1:]) if token != image or after != image]
        return [int(token) for token in kept]

    # -- what is found once --

    def _find_end(self) -> int | None:
        """The first token that the template writes behind a reply, if it is an added one."""
        text = self.traits.end_text
        added = [t for t in self._tokenizer.added_tokens if t.strip()]  # a line break ends no reply
        found = [(text.find(token), token) for token in added if token in text]
        return self._tokenizer.token_id(min(found)[1]) if found else None

    def _add_end_of_calls(self) -> None:
        """Add the token that ends a reply with calls, where it is another one than behind other replies."""
        if self.traits.call_example is None or self.tool_format is None:
            return
        asked, shown = self.traits.call_example[0], self.traits.call_example[1].rstrip()
        last = next((token for token in self._tokenizer.special_tokens if shown.endswith(token)), "")
        token_id = self._tokenizer.token_id(last) if last else None
        if token_id is None or token_id in self.stop_ids:
            return
        is_end = last == LAST_TOKENS.get(self.tool_format)
        if is_end or self._reads(self.tool_format, self._encode_after(asked, shown.removesuffix(last))[0], asked):
            self.stop_ids = (*self.stop_ids, token_id)

    def _find_format(self, name: str) -> str | None:
        if name == "none":
            return None
        if name != "auto":
            name = ALIASES.get(name, name.replace("_", "-"))
            if name not in FORMATS:
                known = ", ".join(FORMATS)
                raise ConfigError(f"[{self.template.place}] tool_parser = {name!r}: use auto, none, or one of {known}")
            return name
        if self.traits.call_example is None:
            marks = FORMAT_MARKS if self.traits.shows_tools else {}
            return next((each for each, mark in marks.items() if mark in self.template.text), None)
        asked, shown = self.traits.call_example
        ids = self._encode_after(asked, shown.rstrip())[0]
        return next((each for each in FORMATS if self._reads(each, ids, asked)), None)

    def _reads(self, name: str, ids: list[int], asked: str) -> bool:
        """Whether a format reads the call that the template has written."""
        tokens = LIBRARY_FORMATS[name][1].values() if name in LIBRARY_FORMATS else ()
        if any(self._tokenizer.token_id(token) is None for token in tokens if token != "<|constrain|>"):
            return False
        before, self.tool_format = getattr(self, "tool_format", None), name
        try:
            calls = self._parse(ids, asked, [TOOL])[0].calls
        except Exception:  # another format's text
            return False
        finally:
            self.tool_format = before
        return [(c.name, c.arguments) for c in calls] == [(CALL["function"]["name"], CALL["function"]["arguments"])]


def split_thought(text: str, thinking: Thinking, is_open: bool) -> tuple[str | None, str, bool]:
    """Thought, content, and whether the thought is not closed. is_open: the prompt has begun it."""
    body = text
    if not is_open:
        if not text.lstrip().startswith(thinking.open):
            return None, text, False
        body = text.lstrip().removeprefix(thinking.before)
        body = body if body != text.lstrip() else body.removeprefix(thinking.open)
    elif text.lstrip().startswith(thinking.open):
        body = text.lstrip().removeprefix(thinking.open)
    for close in (thinking.after, thinking.close):
        if close in body:
            thought, _, content = body.partition(close)
            return thought.strip("\n"), content if close == thinking.after else content.lstrip("\n"), False
    return body.strip("\n"), "", True


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part["text"] for part in content if is_text(part))
    return content if isinstance(content, str) else ""


def is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))


def _meaning(parsed: Parsed) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call.name, call.arguments) for call in parsed.calls if call.name is not None]
    return parsed.content.strip(), (parsed.reasoning or "").strip(), calls


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
