"""What a renderer (render.py) asks of the two ways in which messages become tokens.

`FamilyBackend` (family_backend.py) hides the renderers library, one hand-written renderer per family of models;
`TemplateBackend` (template_backend.py) runs the template in the model's own files, and has the library read calls in
some formats. `import_library` alone imports the library, where it is needed: that takes a fifth of a second.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from stretto.base.errors import DataError
from stretto.chat.tool_calls import Call, call_of

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int

Message = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """Tokens of messages."""

    token_ids: list[int]
    owners: list[int] = field(default_factory=list)
    """Per token the index of the message whose text it belongs to, -1 for the template's; empty if not asked for."""


@dataclass(frozen=True)
class Parsed:
    """What a reply says."""

    content: str
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Reply:
    """A reply as the model would sample it."""

    token_ids: list[int]
    is_trained: list[bool]
    prompt_ids: list[int] | None = None
    """The prompt that it answers, if that is not the one of `render`: a thought is sampled in another mode."""
    prompt_owners: list[int] = field(default_factory=list)
    """As `Rendered.owners`, of prompt_ids."""


class Backend(Protocol):
    """Messages <-> tokens. Messages have text only; a conversation that cannot be rendered is a DataError."""

    name: str
    stop_ids: tuple[int, ...]
    reads_history: bool
    """Whether `bridge` reads the messages of the history, rather than their tokens alone."""
    keeps_special_text: bool
    """Whether the text of a special token in a message stays text by itself."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        add_generation_prompt: bool,
        has_owners: bool = False,
    ) -> Rendered:
        """The tokens of a conversation; with the start of a reply if add_generation_prompt."""
        ...

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
        """The prompt after a reply: all earlier tokens, then the new messages. None if the history looks different now.

        history: all messages of the prompt, and the reply.
        """
        ...

    def between(
        self,
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"],
        completion_ids: Sequence[int] | Int[np.ndarray, " completion"],
        history: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> Sequence[int] | None:
        """What `bridge` puts behind the earlier tokens, if it need not look at all of them to know; else None."""
        ...

    def reply(self, history: Sequence[Message], reply: Message, tools: Sequence[Message] | None) -> Reply | None:
        """The tokens that the model would sample for a reply.

        None if the template does not show the reply as the model would sample it.
        """
        ...

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: Sequence[int] | Int[np.ndarray, " prompt"] | None,
        tools: Sequence[Message] | None,
    ) -> Parsed:
        """What a completion says."""
        ...


_WORD = "zqxhighvz"  # a text that nobody writes


class Shown:
    """What a way to write conversations shows: its tools, and each message where it stands.

    A message is tried in the conversation at hand, once per role, role before it, with or without tools, and whether a
    system message comes later, which may take the place of an earlier one.
    """

    def __init__(
        self,
        name: str,
        place: str,
        *,
        tools: bool,
        write: Callable[[Sequence[Message], Sequence[Message] | None], str | None],
    ) -> None:
        """place: the path of the config's section, for messages.

        tools: whether it shows descriptions of tools; write: a conversation as text, None if it is refused.
        """
        self._name, self._place, self._shows_tools, self._write = name, place, tools, write
        self._cases: set[tuple[str, str | None, bool, bool]] = set()

    def check(self, messages: Sequence[Message], tools: Sequence[Message] | None, first: int = 0) -> None:
        """Check that nothing of a conversation is dropped; messages before `first` are known to be shown.

        Raises: DataError if tools, or a message that is not the assistant's, are not shown.
        """
        self.check_tools(tools)
        for index in range(first, len(messages)):
            self._check_message(messages, index, tools)

    def check_tools(self, tools: Sequence[Message] | None) -> None:
        """Check that the policy would be told of the tools.

        Raises: DataError if not.
        """
        if tools and not self._shows_tools:
            raise DataError(
                f"{self._name} shows no tools, so that the model would not know of them: describe them in a message, "
                f'or give a template that shows them, such as {self._place}.template = "chatml"'
            )

    def _check_message(self, messages: Sequence[Message], index: int, tools: Sequence[Message] | None) -> None:
        message, content = messages[index], messages[index].get("content")
        role, before = message["role"], messages[index - 1]["role"] if index else None
        is_followed = role == "system" and any(each["role"] == "system" for each in messages[index + 1 :])
        case = (role, before, bool(tools), is_followed)
        if role == "assistant" or case in self._cases or not content:
            return
        word: Any = [{"type": "text", "text": _WORD}] if isinstance(content, list) else _WORD
        changed = [*messages[:index], message | {"content": word}, *messages[index + 1 :]]
        text = self._write(changed, tools)
        if text is None or _WORD in text:
            self._cases.add(case)
            return
        behind = "" if before is None else f" behind one of the role {before!r}"
        raise DataError(
            f"{self._name} drops a message of the role {role!r}{behind} (message {index}); leave it out, write its "
            f"text in another message, or give another template as {self._place}.template"
        )


class _Later(ModuleType):
    """What stands for a package while renderers is imported, which has it for a function that stretto does not call.

    Whoever imports the package meanwhile, in another thread, gets the real one, and so does who asks for a name in it.
    """

    AsyncOpenAI = object  # the type of an argument of that function

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and threading.get_ident() == self._thread:
            raise AttributeError(name)  # `from openai import` asks for it
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


_NOT_NEEDED = ("openai", "httpx")
"""Packages of the client that renderers has; they take three quarters of a second to import."""


def import_library(module: str = "renderers") -> Any:
    """The renderers library, or a module of it, without the packages of its client."""
    if "renderers" in sys.modules:
        return importlib.import_module(module)
    stand_ins = {name: _Later(name) for name in _NOT_NEEDED if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(module)
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


def read_by_library(read: Callable[[], Any], text: Callable[[], str]) -> Parsed:
    """A reply as the library reads it; read: asks it, text: all that the reply says.

    What the library raises for, such as brackets in thousands of levels, is a text with one malformed call.
    """
    try:
        parsed = read()
    except Exception:  # the policy may sample anything
        said = text()
        return Parsed(said, calls=[Call(said)])
    calls = [
        call_of(call.raw, call.name, call.arguments or {}, call.id) if call.status == "ok" else Call(call.raw)
        for call in parsed.tool_calls
    ]
    return Parsed(parsed.content, parsed.reasoning_content, calls)


def one_call(said: Parsed) -> Parsed:
    """The reply with all calls behind its first one malformed."""
    first = next((call for call in said.calls if call.name is not None), None)
    return replace(said, calls=[call if call is first else Call(call.raw) for call in said.calls])
