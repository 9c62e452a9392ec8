"""Messages <-> tokens by the renderers library: one hand-written renderer per family of models.

The library looks at every token of prompt and reply, once for a thought, once for calls and once for their ends. Most
turns need none of that: text, the end token, and a message of text as the answer. `PlainTurns` does these, with what
it has seen the library do, at a fifth of the cost.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from stretto.base.errors import ConfigError, DataError
from stretto.chat.backend import Message, Parsed, Rendered, Reply, Shown, import_library, read_by_library
from stretto.chat.conversations import CALL, CALL_ID, ONE_TURN, TOOL
from stretto.chat.tokenizer import Tokenizer
from stretto.config.sections.model import RendererSection

if TYPE_CHECKING:
    from jaxtyping import Int

_NAMELESS = "unknown"
"""What gpt-oss's renderer of the library writes in the place of a function that a result does not name."""
_RARE = "zqxhighvz"
"""A text that no template has."""
_PAST = "x"
"""Stands for images and calls of the past, and for thoughts, where only what is behind them is tried."""


class UnfitVocabularyError(ConfigError):
    """A vocabulary lacks special tokens of a family."""


_MARK = re.compile("[<>\\[\\]{}|\u25c1\u25b7\uff5c]")
"""A character of what families mark thoughts and calls with, where that is no token of its own."""
_LONGEST_TAIL = 32
"""Tokens of the longest beginning of a reply, with the end of the message before it."""
_MAX_TAILS = 64
"""Beginnings of replies for which the library is asked: a template has few, where messages end with an end token."""
_LONGEST_KEPT = 1024
"""Characters of the longest messages that are remembered."""
_PROBES = ("a", " a b ", "\n\na\n b\n", "b.\n\n", "\ta  1", " \n")
_TRIMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.lstrip(),
    lambda text: text.rstrip(),
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)
"""What a family may leave out at the ends of a reply."""


class PlainTurns:
    """Replies of text and one end token, and messages of text behind them.

    What the library makes of such a reply depends on how it begins (the tail: the prompt from its last end token on)
    and on its end token, and so does what it puts between the reply and the next one. It is asked once for each, with
    probes in the place of the reply.
    """

    def __init__(self, backend: Any, tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> None:
        self._backend, self._tokenizer = backend, tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._marks = self._stop_ids.union(tokenizer.added_ids)
        self._trims: dict[tuple[tuple[int, ...], int], Callable[[str], str] | None] = {}  # by tail and end token
        self._between = lru_cache(maxsize=4096)(self._find_between)

    def parse(
        self, reply_ids: Sequence[int], prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None
    ) -> Parsed | None:
        """What a reply says; None if the library has to look at it."""
        ids = _as_list(reply_ids)
        text, tail = self._text_of(ids), self._tail_of(prompt_ids)
        if text is None or tail is None or (trim := self._trim_after(tail, ids[-1])) is None:
            return None
        return Parsed(trim(text))

    def between(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        reply_ids: Sequence[int] | Int[np.ndarray, " reply"],
        reply: Message,
        messages: Sequence[Message],
    ) -> tuple[int, ...] | None:
        """The tokens from the end of a reply to the beginning of the next one; None if the library has to find them.

        reply: the message that was read in reply_ids.
        """
        if not all(isinstance(value, str) for message in messages for value in message.values()):
            return None
        ids = _as_list(reply_ids)
        text = reply.get("content") if len(reply) == 2 else None  # else it has a thought or calls
        if not isinstance(text, str) or not self._is_text(ids) or _MARK.search(text):
            return None
        if not (tail := self._tail_of(prompt_ids)):
            return None
        if self._trim_after(tail, ids[-1]) is None:
            return None
        is_short = sum(len(value) for message in messages for value in message.values()) < _LONGEST_KEPT
        find = self._between if is_short else self._find_between
        return find(tail, ids[-1], tuple(tuple(message.items()) for message in messages))

    def _is_text(self, ids: list[int]) -> bool:
        """Are the tokens of a reply text and one end token?"""
        return len(ids) > 1 and ids[-1] in self._stop_ids and self._marks.isdisjoint(ids[:-1])

    def _text_of(self, ids: list[int]) -> str | None:
        """The text of a reply before its end token, if it is text alone."""
        if not self._is_text(ids):
            return None
        text = self._tokenizer.decode(ids[:-1])
        return None if _MARK.search(text) else text

    def _tail_of(self, prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None) -> tuple[int, ...] | None:
        if prompt_ids is None:
            return ()
        last = _as_list(prompt_ids[-_LONGEST_TAIL:])
        for start in range(len(last) - 1, -1, -1):
            if last[start] in self._stop_ids:
                return tuple(last[start:])
        return tuple(last) if len(prompt_ids) < _LONGEST_TAIL else None

    def _trim_after(self, tail: tuple[int, ...], end: int) -> Callable[[str], str] | None:
        if (key := (tail, end)) in self._trims:
            return self._trims[key]
        if len(self._trims) >= _MAX_TAILS:
            return None
        trim = self._trims[key] = self._find_trim(tail, end)
        return trim

    def _find_trim(self, tail: tuple[int, ...], end: int) -> Callable[[str], str] | None:
        """What the library leaves out of a reply; None if it does more, as where the reply begins in a thought."""
        found = []
        for probe in _PROBES:
            ids = self._tokenizer.encode(probe)
            parsed = self._backend.parse_response([*ids, end], tools=None, prompt_ids=list(tail) or None)
            if not self._marks.isdisjoint(ids) or parsed.reasoning_content is not None or parsed.tool_calls:
                return None
            found.append((self._tokenizer.decode(ids), parsed.content))
        return next((trim for trim in _TRIMS if all(trim(text) == content for text, content in found)), None)

    def _find_between(
        self, tail: tuple[int, ...], end: int, messages: tuple[tuple[tuple[str, str], ...], ...]
    ) -> tuple[int, ...] | None:
        before = list(tail), [*self._tokenizer.encode(_PROBES[0]), end]
        found = self._backend.bridge_to_next_turn(*before, [dict(message) for message in messages], tools=None)
        num_before = len(before[0]) + len(before[1])
        if found is None or found.token_ids[:num_before] != before[0] + before[1]:
            return None
        return tuple(found.token_ids[num_before:])


class FamilyBackend:
    """One renderer of the library."""

    reads_history = False

    def __init__(
        self, backend: Any, family: str, tokenizer: Tokenizer, *, place: str, with_thoughts: Any = None
    ) -> None:
        """place: the path of the config's section, for messages; with_thoughts: a renderer that keeps all thoughts."""
        self.name = family
        self._backend, self._with_thoughts = backend, with_thoughts
        self._encode, self._decode = tokenizer.encode, tokenizer.decode
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(backend.get_stop_token_ids()))
        question = [{"role": "user", "content": "a"}]
        num_tokens = len(backend.render_ids(question))
        end = next((text for text in map(tokenizer.token_text, self.stop_ids) if text), "")
        spelled = backend.render_ids([{"role": "user", "content": f"a{end}"}])
        self.keeps_special_text = len(spelled) - num_tokens > 1  # gpt-oss: the library has its own tokenizer
        # Tokens before every reply: the role header and, with thinking off, an empty thought.
        self._reply_prefix = backend.render_ids(question, add_generation_prompt=True)[num_tokens:]
        self._plain = PlainTurns(backend, tokenizer, self.stop_ids)
        self._shows_ids = False
        called = [*ONE_TURN, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        shown = self._attempt(called, None) or ""
        self._shows_ids = CALL_ID in shown and CALL["function"]["name"] not in shown
        nameless = {"role": "tool", "content": _PAST, "tool_call_id": CALL_ID}
        self._needs_names = _NAMELESS in (self._attempt([*called, nameless], None) or "")
        plain, with_tools = self._attempt(ONE_TURN, None), self._attempt(ONE_TURN, [TOOL])
        name = f"the renderer of the family {family}"
        self._shown = Shown(name, place, tools=plain != with_tools, write=self._attempt)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        add_generation_prompt: bool,
        has_owners: bool = False,
    ) -> Rendered:
        self._shown.check(messages, tools)
        messages = self._identified(messages)
        arguments = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        with self._refusals():
            if not has_owners:
                return Rendered(self._backend.render_ids(list(messages), **arguments))
            rendered = self._backend.render(list(messages), **arguments)
        return self._with_owners(rendered, messages)

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
        self._check_next(history, messages, tools)
        messages = self._identified([*history, *messages])[len(history) :]
        before = _as_list(prompt_ids), _as_list(completion_ids)
        with self._refusals():
            found = self._backend.bridge_to_next_turn(*before, list(messages), tools=tools)
        known = [*before[0], *before[1]]
        if found is None or found.token_ids[: len(known)] != known:  # it drops tokens behind an end token
            return None
        return self._with_owners(found, messages) if has_owners else Rendered(found.token_ids)

    def between(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        history: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> Sequence[int] | None:
        if tools or not all(message["role"] == "user" and len(message) == 2 for message in messages):
            return None
        self._check_next(history, messages, tools)
        return self._plain.between(prompt_ids, completion_ids, history[-1], messages)

    def _check_next(
        self, history: Sequence[Message], messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> None:
        """Raises: DataError for a new message that the family does not show."""
        if not any(message["role"] == "assistant" for message in messages):
            past = [m if isinstance(m.get("content"), str) else m | {"content": _PAST} for m in history]
            self._shown.check([*past, *messages], tools, first=len(past))

    def reply(self, history: Sequence[Message], reply: Message, tools: Sequence[Message] | None) -> Reply | None:
        if not history:  # a family has no prompt without a message
            return None
        self._shown.check(history, tools)
        *history, reply = self._identified([*history, reply])
        backends = (self._backend,) if self._with_thoughts is None else (self._backend, self._with_thoughts)
        tried = (self._sampled(backend, history, reply, tools) for backend in backends)
        found = next((each for each in tried if each is not None and self._shows_reply(reply, each.token_ids)), None)
        prompt = self._backend.render_ids(list(history), tools=tools, add_generation_prompt=True)
        if found is not None and found.prompt_ids == prompt:
            return Reply(found.token_ids, found.is_trained)
        return self._without_thought(history, reply, tools, prompt) or found

    def _without_thought(
        self, history: Sequence[Message], reply: Message, tools: Sequence[Message] | None, prompt: list[int]
    ) -> Reply | None:
        """A reply without a thought as it is sampled after a prompt that begins one: the thought ends at once.

        gpt-oss has no prompt for such replies: all of them begin a thought. None for other families.
        """
        if self._with_thoughts is None or reply.get("reasoning_content"):
            return None
        thought = self._encode(_PAST)
        for backend in (self._backend, self._with_thoughts):
            found = self._sampled(backend, history, reply | {"reasoning_content": _PAST}, tools)
            if found is None or found.prompt_ids != prompt or found.token_ids[: len(thought)] != thought:
                continue
            token_ids = found.token_ids[len(thought) :]
            return Reply(token_ids, [True] * len(token_ids)) if self._shows_reply(reply, token_ids) else None
        return None

    def _sampled(
        self, backend: Any, history: Sequence[Message], reply: Message, tools: Sequence[Message] | None
    ) -> Reply | None:
        """What a renderer of the library shows as sampled in a reply, and what it shows before it."""
        with self._refusals():
            rendered = backend.render([*history, reply], tools=tools)
        ids = rendered.token_ids
        assert len(rendered.sampled_mask) == len(ids), f"{self.name} attributes no tokens"
        of_reply = [i for i, owner in enumerate(rendered.message_indices) if owner == len(history)]
        start, stop = (of_reply[0], of_reply[-1] + 1) if of_reply else (0, 0)
        num_prefix = len(self._reply_prefix)
        if ids[start : start + num_prefix] == self._reply_prefix:
            start += num_prefix
        sampled = [i for i in range(start, stop) if rendered.sampled_mask[i]]
        if not sampled:
            return None
        # Whatever stands between sampled tokens was sampled too: gpt-oss opens a channel there.
        first, end = sampled[0], sampled[-1] + 1
        owners = self._with_owners(rendered, history).owners[:first]
        token_ids = ids[first:end]
        if token_ids[-1] not in self.stop_ids and (last := self._ends[bool(reply.get("tool_calls"))]) is not None:
            token_ids = [*token_ids, last]
        return Reply(token_ids, [True] * len(token_ids), ids[:first], owners)

    @cached_property
    def _ends(self) -> tuple[int | None, int | None]:
        """The first end token behind a reply of text, and behind one of calls, where another message follows.

        GLM's templates write nothing behind a reply: the model ends it with the role of the next message.
        """
        answered = [{"role": "assistant", "content": _PAST}, *ONE_TURN]
        return self._end_behind([*ONE_TURN, *answered]), self._end_behind([*ONE_TURN, *_called(_PAST)])

    def _end_behind(self, messages: Sequence[Message]) -> int | None:
        """The first end token from the reply to ONE_TURN on; None if there is none."""
        if (rendered := self._try_with_owners(messages)) is None or len(ONE_TURN) not in rendered.message_indices:
            return None
        start = rendered.message_indices.index(len(ONE_TURN))
        return next((token for token in rendered.token_ids[start:] if token in self.stop_ids), None)

    def _try_with_owners(self, messages: Sequence[Message]) -> Any:
        """The library's rendering of a conversation without tools; None if it refuses it."""
        try:
            return self._backend.render(list(messages), tools=None)
        except Exception:  # whatever a renderer of the library raises for what it does not show
            return None

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None,
        tools: Sequence[Message] | None,
    ) -> Parsed:
        if (plain := self._plain.parse(completion_ids, prompt_ids)) is not None:
            return plain
        ids, prompt = _as_list(completion_ids), None if prompt_ids is None else _as_list(prompt_ids)
        said = itertools.takewhile(lambda token: token not in self.stop_ids, ids)
        return read_by_library(
            lambda: self._backend.parse_response(ids, tools=tools, prompt_ids=prompt), lambda: self._decode(said)
        )

    def _identified(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with ids of calls that name the function, where a family shows the id in the place of the name.

        Ids that do stay, such as those that the policy has sampled; a result gets the id of its call. Where a family
        shows the function of a result, a result without a name has that of its call. Parts of text are one text.
        """
        messages = [
            message | {"content": _text_of(message["content"])} if isinstance(message.get("content"), list) else message
            for message in messages
        ]
        if self._needs_names:
            return _with_names(messages)
        if not self._shows_ids:
            return messages
        numbers = itertools.count()
        known: dict[Any, str] = {}
        waiting: list[str] = []
        found: list[Message] = []
        for message in messages:
            if calls := message.get("tool_calls"):
                named = [_with_id(call, next(numbers)) for call in calls]
                waiting = [call["id"] for call in named]
                known |= {call["id"]: new["id"] for call, new in zip(calls, named) if call.get("id")}
                message = message | {"tool_calls": named}
            elif message["role"] == "tool" and waiting:
                asked = known.get(message.get("tool_call_id"))
                found_id = asked if asked in waiting else waiting[0]
                waiting.remove(found_id)
                message = message | {"tool_call_id": found_id}
            found.append(message)
        return found

    def _attempt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str | None:
        """A conversation as text; None if the library refuses it."""
        try:
            ids = self._backend.render_ids(list(messages), tools=tools, add_generation_prompt=True)
        except Exception:  # whatever a renderer of the library raises; what is rendered in earnest says it
            return None
        return self._decode(ids)

    def _shows_reply(self, reply: Message, token_ids: list[int]) -> bool:
        """Whether tokens of a reply have its thought, then its text, and the name of each function that it calls."""
        shown = self._decode(token_ids[:-1] if token_ids[-1:] and token_ids[-1] in self.stop_ids else token_ids)
        names = [call["function"].get("name") for call in reply.get("tool_calls") or ()]
        start = 0
        for part in (reply.get("reasoning_content"), reply.get("content")):
            text = part.strip() if isinstance(part, str) else ""
            if (at := shown.find(text, start)) < 0:
                # A tokenizer may write a letter otherwise: Qwen's composes an e and an accent.
                text = self._decode(self._encode(text)).strip()
                at = shown.find(text, start)
            if at < 0:
                return False
            start = at + len(text)
        return all(name in shown for name in names if isinstance(name, str))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What the library says of a conversation that it refuses, as an error of who wrote the conversation."""
        try:
            yield
        except Exception as cause:  # whatever a renderer of the library raises for data that it does not expect
            why = str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
            if isinstance(cause, ValidationError):  # of several lines
                first = cause.errors()[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.60}"
            why = " ".join(why.split())
            raise DataError(f"the renderer of the family {self.name} refuses the conversation: {why}") from cause

    def _with_owners(self, rendered: Any, messages: Sequence[Message]) -> Rendered:
        """messages: those that the library has numbered."""
        ids, owners, is_text = rendered.token_ids, rendered.message_indices, rendered.is_content
        assert len(is_text) == len(owners) == len(ids), f"{self.name} attributes no tokens"
        owners = [owner if text else -1 for owner, text in zip(owners, is_text)]
        for index, message in enumerate(messages):
            lead, tail = self._around.get(message["role"], ("", ""))
            if (lead or tail) and index in owners:
                self._narrow(ids, owners, index, _text_of(message.get("content")), lead, tail)
        return Rendered(ids, owners)

    def _narrow(self, ids: list[int], owners: list[int], index: int, content: str, lead: str, tail: str) -> None:
        """Take from a message the tokens of the template before and behind its text."""
        start = owners.index(index)
        stop = start + owners[start:].count(index)
        shown = self._decode(ids[start:stop])
        before = next(part for part in (lead[at:] for at in range(len(lead) + 1)) if shown.startswith(part))
        kept = before + content if shown.startswith(before + content) else shown.removesuffix(tail)
        first = start
        while first < stop and len(self._decode(ids[start : first + 1])) <= len(before):
            first += 1
        last = stop
        while last > first and self._decode(ids[start : last - 1]).startswith(kept):
            last -= 1
        owners[start:stop] = [index if first <= at < last else -1 for at in range(start, stop)]

    @cached_property
    def _around(self) -> dict[str, tuple[str, str]]:
        """By role, the template's own text before and behind a message's that the library takes for a part of it.

        It counts a heading to gpt-oss's system message, and quotes to the results of Llama 3 and Gemma 4.
        """
        tried = ([{"role": "system", "content": _RARE}, *ONE_TURN], [*ONE_TURN, *_called(_RARE)])
        found = {}
        for messages in tried:
            at = next(index for index, message in enumerate(messages) if message["content"] == _RARE)
            if (rendered := self._try_with_owners(messages)) is None:
                continue
            is_own = [i == at and text for i, text in zip(rendered.message_indices, rendered.is_content)]
            shown = self._decode(list(itertools.compress(rendered.token_ids, is_own)))
            before, is_shown, behind = shown.partition(_RARE)
            if is_shown:
                found[messages[at]["role"]] = before, behind
        return found


def _called(result: str) -> list[Message]:
    """A reply that calls a function, and what that returns."""
    answer = {"role": "tool", "content": result, "name": CALL["function"]["name"], "tool_call_id": CALL_ID}
    return [{"role": "assistant", "content": "", "tool_calls": [CALL]}, answer]


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages with the function's name in each result, by the id of its call, else by the order of the calls."""
    found: list[Message] = []
    waiting: list[tuple[Any, Any]] = []  # ids and names of calls without a result
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [(call.get("id"), call["function"].get("name")) for call in calls]
        elif message["role"] == "tool" and waiting:
            own = message.get("tool_call_id")
            answered = next((each for each in waiting if own is not None and each[0] == own), waiting[0])
            waiting.remove(answered)
            if not message.get("name"):
                message = message | {"name": answered[1]}
        found.append(message)
    return found


def _with_id(call: Message, number: int) -> Message:
    """The call with an id as Kimi K2 samples it, functions.NAME:NUMBER, if its own does not name the function."""
    name, own = call["function"]["name"], call.get("id")
    return call if own and name in own else call | {"id": f"functions.{name}:{number}"}


def _as_list(token_ids: Sequence[int] | Int[np.ndarray, " tokens"]) -> list[int]:
    if isinstance(token_ids, np.ndarray):
        return token_ids.tolist()
    return token_ids if isinstance(token_ids, list) else list(token_ids)


def build_family(tokenizer: Tokenizer, family: str, section: RendererSection) -> FamilyBackend:
    """Build the library's renderer of a family.

    Raises: ConfigError for a family that the library does not have or whose special tokens the vocabulary lacks, and
    for settings that the family's template does not have.
    """
    renderers, place = import_library(), section.place
    try:
        config = renderers.config_from_name(family)
    except ValueError as cause:
        raise ConfigError(
            f'[{place}] name = {family!r} is not a known family: {cause} Or "auto", for the model\'s own chat '
            'template; "text", for prompts as they stand.'
        ) from cause
    if config is None or family in ("default", "custom"):
        raise ConfigError(
            f'[{place}] name = {family!r} cannot tell sampled tokens from those of the template; "template" takes the '
            'template in the model\'s own files and can, as "auto" does.'
        )
    fields = renderers.template_field_names(config)
    settings = {"enable_thinking": section.enable_thinking} if "enable_thinking" in fields else {}
    if section.clear_thinking is not None:
        if "clear_thinking" not in fields:
            raise ConfigError(
                f"[{place}] clear_thinking = {str(section.clear_thinking).lower()}: the template of {family!r} has no "
                "such setting; remove it"
            )
        settings["clear_thinking"] = section.clear_thinking
    settings |= section.settings
    if settings:
        config = _with_settings(config, settings, family, place)
    try:
        backend, with_thoughts = renderers.create_renderer(tokenizer, config), None
        if getattr(config, "auto_drop_analysis", False):  # gpt-oss: a rendered reply would lack its thought
            kept = config.model_copy(update={"auto_drop_analysis": False})
            with_thoughts = renderers.create_renderer(tokenizer, kept)
        return FamilyBackend(backend, family, tokenizer, place=place, with_thoughts=with_thoughts)
    except AssertionError as cause:
        raise UnfitVocabularyError(
            f"[{place}] name = {family!r} does not fit {tokenizer.name_or_path}: {cause}"
        ) from cause
    except RuntimeError as cause:  # gpt-oss: its library fetches a vocabulary
        raise UnfitVocabularyError(
            f"[{place}] name = {family!r}: {cause}; put what it fetches into the cache of this machine, "
            'or use the template of the model\'s files, name = "auto"'
        ) from cause


def _with_settings(config: Any, settings: dict[str, Any], family: str, place: str) -> Any:
    """The config of a family's template with these settings.

    Raises: ConfigError for a setting or a value that the template does not have.
    """
    known = [name for name in type(config).model_fields if name != "name"]
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigError(
            f"[{place}] settings.{unknown[0]}: the template of {family!r} has no such setting; it has "
            f"{', '.join(known)}"
        )
    try:
        return type(config)(**settings)
    except ValueError as cause:
        first = cause.errors()[0] if isinstance(cause, ValidationError) else {"loc": ("",), "msg": str(cause)}
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"[{place}] settings.{name} = {settings.get(name)!r} for the template of {family!r}: {first['msg']}"
        ) from cause
