"""Environments of many turns in twenty lines: what to say first, what to answer, what it was worth.

`MultiTurnEnv` plays the turns and stops at the limits; `ToolEnv` is one whose answers are the results of
tools. An environment with a flow of its own (several agents, branches) writes `rollout` instead: base.py.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.envs.base import (
    LimitReached,
    Limits,
    Message,
    Reply,
    RolloutContext,
    RolloutResult,
    Split,
    TaskSource,
    scored,
)
from stretto.envs.tools import Toolset
from stretto.records.rollout import Task


@dataclass
class Episode:
    """One episode under way. `state` is the environment's own."""

    task: Task
    messages: list[Message]
    state: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 0
    is_truncated: bool = False  # a limit ended it, not the environment

    @property
    def last_text(self) -> str:
        """What the policy said last; empty when it said nothing."""
        said = [m for m in self.messages if m["role"] == "assistant"]
        return (said[-1].get("content") or "") if said else ""


class MultiTurnEnv(ABC):
    """Prompt, reply, answer, reply, ... until `respond` has nothing to say or a limit is reached."""

    name: str
    limits = Limits()

    @abstractmethod
    def tasks(self, split: Split) -> TaskSource:
        """The tasks to train on, or the held-out ones."""

    @abstractmethod
    def prompt(self, task: Task) -> list[Message]:
        """The first messages."""

    @abstractmethod
    def respond(
        self, episode: Episode, reply: Reply
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Messages that answer the reply, which `episode.messages` ends with; None or [] ends the episode."""

    @abstractmethod
    def score(self, episode: Episode) -> float | RolloutResult | Awaitable[float | RolloutResult]:
        """Reward of a whole episode, truncated ones too."""

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Tools the policy is told of."""
        return None

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        episode = Episode(task, list(self.prompt(task)))
        tools = self.tool_schemas()
        while True:
            try:
                reply = await ctx.chat(episode.messages, tools)
            except LimitReached:
                if not episode.num_turns:
                    raise  # nothing was said, so there is nothing to score
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
        result = await scored(self.score(episode))
        if not episode.is_truncated:
            return result
        return RolloutResult(
            reward=result.reward,
            agent_rewards=result.agent_rewards,
            metrics=result.metrics,
            is_truncated=True,
        )


class ToolEnv(MultiTurnEnv):
    """A policy with tools: the episode ends with the first reply that calls none.

    `tools` are functions (see tools.py for what they must look like).
    """

    limits = Limits(max_turns=10)
    tools: Sequence[Callable[..., Any]] = ()
    tool_timeout_s: float | None = 30.0

    def toolset(self) -> Toolset:
        """The environment's tools, made once."""
        if "_toolset" not in vars(self):
            # Functions of the class body are looked up without `self`; bound methods come as they are.
            self._toolset = Toolset(self.tools, self.tool_timeout_s)
        return self._toolset

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.toolset().schemas

    async def respond(self, episode: Episode, reply: Reply) -> list[Message]:
        return await self.toolset().answer(reply)
