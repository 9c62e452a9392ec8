"""Environments of many turns: the first messages, the answer to each reply, the final score.

`MultiTurnEnv` plays the turns and stops at the limits. `ToolEnv` is one that answers with the results of
tools. An environment with a different flow (several agents, branches) implements `rollout` itself: base.py.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec.structs import replace

from stretto.base.errors import EnvError
from stretto.data.messages import checked_messages
from stretto.data.values import describe_value
from stretto.envs.base import (
    EpisodeLimits,
    LimitReached,
    Message,
    Prompt,
    Reply,
    RolloutContext,
    RolloutResult,
    Split,
    TaskSource,
    checked_prompt,
    checked_score,
    where_of,
)
from stretto.envs.tools import Toolset
from stretto.records.rollout import Task


@dataclass
class Episode:
    """The state of one episode. `state` belongs to the environment."""

    task: Task
    messages: list[Message]
    state: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 0
    is_truncated: bool = False  # ended by a limit, not by the environment

    @property
    def last_text(self) -> str:
        """Text of the policy's last reply; empty if there is none."""
        replies = [m for m in self.messages if m["role"] == "assistant"]
        return (replies[-1].get("content") or "") if replies else ""


class MultiTurnEnv(ABC):
    """Prompt, reply, answer, reply, ... until `respond` returns no messages or a limit is reached."""

    name: str
    limits = EpisodeLimits()

    @abstractmethod
    def tasks(self, split: Split) -> TaskSource:
        """The tasks of one split: to train on, or held out."""

    @abstractmethod
    def prompt(self, task: Task) -> Prompt:
        """The first messages, or the text of a first message of the user."""

    @abstractmethod
    def respond(self, episode: Episode, reply: Reply) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Messages that answer the reply, the last of `episode.messages`; None or [] ends the episode."""

    @abstractmethod
    def score(self, episode: Episode) -> float | RolloutResult | Awaitable[float | RolloutResult]:
        """Reward of a whole episode, also of a truncated one."""

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the policy may call."""
        return None

    # Credit per turn: an environment writes those of these that it can answer.

    def turn_reward(self, episode: Episode, reply: Reply) -> float | Awaitable[float | None] | None:
        """Reward of a reply, beside the score of the episode; None for all turns: they are not scored.

        Asked after `respond`, and for a reply that was cut off.
        """
        return None

    def state_value(self, episode: Episode) -> float | Awaitable[float] | None:
        """What the state before a reply is worth: the score that the episode may be expected to get."""
        return None

    def state_name(self, episode: Episode) -> str | Awaitable[str | None] | None:
        """A name of the state before a reply: replies to equal states are compared. None: with no other."""
        return None

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        messages = checked_prompt(self.prompt(task), where_of(self, "prompt"))
        episode = Episode(task, messages)
        turns = _TurnNotes(self, episode)
        tools = self.tool_schemas()
        while True:
            await turns.note_state()
            try:
                reply = await ctx.chat(episode.messages, tools)
            except LimitReached:
                if not episode.num_turns:
                    raise  # without a reply there is nothing to score
                episode.is_truncated = True
                break
            episode.messages.append(reply.message)
            episode.num_turns += 1
            is_cut_off = reply.finish_reason == "length"
            episode.is_truncated |= is_cut_off
            answer = [] if is_cut_off else await self._turn_after(episode, reply)
            await turns.note_reply(reply)
            if not answer:
                break
            episode.messages += answer
        result = turns.with_turns(await checked_score(self.score(episode), where_of(self, "score")))
        return replace(result, is_truncated=True) if episode.is_truncated else result

    async def _turn_after(self, episode: Episode, reply: Reply) -> list[Message]:
        """The messages of `respond`, checked; empty if the episode ends."""
        answer = self.respond(episode, reply)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is None:
            return []
        where = where_of(self, "respond")
        if inspect.isawaitable(answer):
            if (close := getattr(answer, "close", None)) is not None:
                close()  # avoids a second warning, that it was never awaited
            raise EnvError(f"{where} returned a call that nobody awaited; write `async def`, and `await` before it")
        if isinstance(answer, str | Mapping) or not isinstance(answer, Sequence):
            example = '[{"role": "user", "content": "..."}]'
            raise EnvError(f"{where} returned {describe_value(answer)}; return messages, {example}, or None to end")
        return checked_messages(answer, where)


class _TurnNotes:
    """What an environment says of each turn of an episode, by the field of the result and the method that it writes."""

    METHODS: ClassVar[dict[str, str]] = {
        "turn_rewards": "turn_reward", "state_values": "state_value", "states": "state_name"
    }  # fmt: skip

    def __init__(self, env: MultiTurnEnv, episode: Episode) -> None:
        self._env, self._episode = env, episode
        self._said: dict[str, list[Any]] = {
            name: []
            for name, method in self.METHODS.items()
            if getattr(type(env), method) is not getattr(MultiTurnEnv, method)
        }

    async def note_state(self) -> None:
        """Ask about the state before the next reply."""
        for name in self._said.keys() - {"turn_rewards"}:
            await self._note(name, self._episode)

    async def note_reply(self, reply: Reply) -> None:
        """Ask about a reply."""
        if "turn_rewards" in self._said:
            await self._note("turn_rewards", self._episode, reply)

    async def _note(self, name: str, *arguments: Any) -> None:
        value = getattr(self._env, self.METHODS[name])(*arguments)
        self._said[name].append(await value if inspect.isawaitable(value) else value)

    def with_turns(self, result: RolloutResult) -> RolloutResult:
        """The result with what was said, unless the score says it itself; a state without a reply is left out."""
        said = {
            name: tuple(values[: self._episode.num_turns])
            for name, values in self._said.items()
            if not getattr(result, name) and any(value is not None for value in values)
        }
        return replace(result, **said) if said else result


class ToolEnv(MultiTurnEnv):
    """A policy with tools: `answer_tools` answers a reply that calls some, `respond` one that calls none.

    `tools` are functions with annotated arguments (tools.py); an argument annotated `Episode` is the episode, and not
    the policy's to give. The episode ends with the first reply that calls no tool, unless the environment writes a
    `respond` of its own, which gives the next turn.
    """

    limits = EpisodeLimits(max_turns=10)
    tools: Sequence[Callable[..., Any]] = ()
    tool_timeout_s: float | None = 30.0

    def toolset(self) -> Toolset:
        """The environment's tools, built once."""
        if "_toolset" not in vars(self):
            # `tools` is read from the instance: functions in the tuple stay unbound, bound methods stay bound.
            where = f"environment {self.name!r}: {type(self).__name__}.tools"
            self._toolset = Toolset(self.tools, self.tool_timeout_s, Episode, where)
        return self._toolset

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.toolset().schemas

    async def answer_tools(self, episode: Episode, reply: Reply) -> list[Message]:
        """The tool messages for the calls of a reply; empty if it calls none."""
        return await self.toolset().answer(reply, episode)

    def respond(self, episode: Episode, reply: Reply) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Messages that answer a reply without calls; None or [] ends the episode."""
        return None

    async def _turn_after(self, episode: Episode, reply: Reply) -> list[Message]:
        answered = await self.answer_tools(episode, reply)
        return checked_messages(answered, where_of(self, "answer_tools")) or await super()._turn_after(episode, reply)
