"""Frozen models beside the policy, as environments see them: `await ctx.model("judge").chat(messages)`, or `.score`.

`[models.NAME]` says where a model runs, or that the run starts engines for it. An add-on has the client
(orchestrator/beside.py); workers/child.py passes the requests of worker processes on to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from stretto.base.errors import EngineError, StrettoError


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of a frozen model."""

    text: str
    message: dict[str, Any]
    """The assistant message, which may have `tool_calls` or `reasoning_content`."""
    finish_reason: str
    num_prompt_tokens: int = 0
    """As the server counts them; 0 if it does not say."""
    num_completion_tokens: int = 0
    is_cached: bool = False
    """True: an earlier request was the same, and no server was asked."""


class ChatModel(Protocol):
    """A frozen model: one that answers messages has `chat`, a reward model `score`."""

    async def chat(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> ModelReply:
        """A reply to these messages, with temperature 0 unless `options` say otherwise.

        options: further keys of the request, such as max_tokens, temperature, seed, stop, response_format; one that is
        None is left out.

        Raises: EngineError if the model does not answer, after all retries; EnvError if it refuses the request.
        """

    async def score(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> float:
        """What a reward model says of a whole conversation, as its head gives it: any number, higher is better.

        Raises: EngineError if the model does not answer, after all retries; EnvError if it refuses the request, or is
        no reward model.
        """


class Unreachable(ChatModel):
    """Stands for a model in a dry run, which asks none."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def chat(self, messages: Sequence[dict[str, Any]], tools: Any = None, **options: Any) -> ModelReply:
        raise EngineError(f"models.{self.name} is not asked before the run starts")

    async def score(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> float:
        raise EngineError(f"models.{self.name} is not asked before the run starts")


NO_MODELS: Mapping[str, ChatModel] = {}


def model_of(models: Mapping[str, ChatModel], name: str, kind: type[StrettoError]) -> ChatModel:
    """The model of a name.

    Raises: an error of this kind if there is none.
    """
    if name in models:
        return models[name]
    import difflib

    near = difflib.get_close_matches(str(name), models, n=1)
    known = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(models)}" if models else ""
    raise kind(f"no model {name!r} in this run; {known or f'add a table [models.{name}]'}")
