"""What a renderer (render.py) asks of the two ways in which messages become tokens.

`FamilyBackend` (family_backend.py) hides the renderers library, one hand-written renderer per family of models;
`TemplateBackend` (template_backend.py) runs the template in the model's own files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stretto.chat.tool_calls import Call

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
