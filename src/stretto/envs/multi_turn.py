"""Environments of many turns: the first messages, the answer to each reply, the final score.

`MultiTurnEnv` plays the turns and stops at the limits. `ToolEnv` is one that answers with the results of
tools. An environment with a different flow (several agents, branches) implements `rollout` itself: base.py.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

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
    def respond(
        self, episode: Episode, reply: Reply
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Messages that answer the reply, the last of `episode.messages`; None or [] ends the episode."""

    @abstractmethod
    def score(self, episode: Episode) -> float | RolloutResult | Awaitable[float | RolloutResult]:
        """Reward of a whole episode, also of a truncated one."""

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the policy may call."""
        return None

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        messages = checked_prompt(self.prompt(task), f"environment {self.name}: prompt")
        episode = Episode(task, messages)
        tools = self.tool_schemas()
        while True:
            try:
                reply = await ctx.chat(episode.messages, tools)
            except LimitReached:
                if not episode.num_turns:
                    raise  # without a reply there is nothing to score
                episode.is_truncated = True
                break
            episode.messages.append(reply.message)
            episode.num_turns += 1
            if reply.finish_reason == "length":
                episode.is_truncated = True
                break
            answer = self.respond(episode, reply)
            if inspect.isawaitable(answer):
                answer = await answer
            if not answer:
                break
            episode.messages += answer
        result = await checked_score(self.score(episode), f"environment {self.name}: score")
        return replace(result, is_truncated=True) if episode.is_truncated else result


class ToolEnv(MultiTurnEnv):
    """A policy with tools; the episode ends with the first reply that calls none.

    `tools` are functions with annotated arguments (tools.py).
    """

    limits = EpisodeLimits(max_turns=10)
    tools: Sequence[Callable[..., Any]] = ()
    tool_timeout_s: float | None = 30.0

    def toolset(self) -> Toolset:
        """The environment's tools, built once."""
        if "_toolset" not in vars(self):
            # `tools` is read from the instance: functions in the tuple stay unbound, bound methods stay bound.
            self._toolset = Toolset(self.tools, self.tool_timeout_s)
        return self._toolset

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.toolset().schemas

    async def respond(self, episode: Episode, reply: Reply) -> list[Message]:
        return await self.toolset().answer(reply)
