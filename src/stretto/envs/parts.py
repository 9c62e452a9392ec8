"""Rollouts within a rollout: an environment has parts of its episode played by other environments.

    part = await play_part(ctx, self.sums, self.sums.tasks("train").task(7), name="sums")
    return RolloutResult(reward=part.result.reward, parts=(part,))

A part is an agent of the episode, with its own history, named as the part; agents of the other environment are named
`PART/AGENT`. So every token is recorded, all turns count in the limits of the whole episode, and beside them a part has
those of its own environment. Its rewards are those of its agents (envs/result.py merges them into the result).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.base.errors import EnvError
from stretto.base.foreign import call_async
from stretto.envs.base import (
    Environment,
    EpisodeInfo,
    EpisodeLimits,
    LimitReached,
    Message,
    Reply,
    RolloutContext,
    RolloutResult,
)
from stretto.envs.models import ChatModel
from stretto.envs.result import Part, checked_result
from stretto.records.outcomes import Reason
from stretto.records.rollout import Task

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from stretto.config.sections.orchestrator import SamplingSection

MAIN_AGENT = "policy"
MOST_LEVELS = 8
"""Parts within parts; one more is taken for an environment that plays itself without end."""


async def play_part(ctx: RolloutContext, env: Environment, task: Task, name: str, *, is_trained: bool = True) -> Part:
    """Play a task of another environment as a part of this episode; give it back in `RolloutResult.parts`.

    name: of its agent, another one for each part of an episode. Parts may be awaited side by side. A part that reaches
    a limit of its own environment is truncated, with reward 0 unless its environment gives one.

    Raises: LimitReached if the whole episode has reached one; EnvError for whatever the environment raises, a result
    that is not valid, and one that a part cannot have.
    """
    where = f"part {name!r} (environment {env.name}, task {task.task_id})"
    level = ctx.level + 1 if isinstance(ctx, PartContext) else 1
    if level > MOST_LEVELS:
        raise EnvError(f"{where}: {level} parts within each other, more than {MOST_LEVELS}; does it play itself?")
    if hasattr(env, "score_group") and getattr(env, "scores_groups", True):
        raise EnvError(f"{where}: {env.name} rewards whole groups (score_group), and a part is in none")
    use = Use(getattr(env, "limits", None) or EpisodeLimits(), name)
    context = PartContext(ctx.agent(name, is_trained=is_trained), use, level)
    try:
        result = checked_result(await call_async(lambda: env.rollout(task, context), where), where)
    except LimitReached:
        if not use.is_reached or not use.turns:
            raise
        result = RolloutResult(reward=0.0, is_truncated=True)
    if result.branch_rewards:
        raise EnvError(f"{where}: branch_rewards are of sequences that `keep` chooses; a part cannot have them")
    if not use.turns:
        raise EnvError(f"{where} ended before any reply")
    agents = {agent: result.agent_rewards.get(use.own_name(agent), result.reward) for agent in use.agents}
    result = msgspec.structs.replace(result, note=None)
    return Part(name=name, env=env.name, result=result, agents=agents, turns=tuple(use.turns))


@dataclass
class Use:
    """What a part has used, all its agents together."""

    limits: EpisodeLimits
    name: str
    agents: dict[str, None] = field(default_factory=dict)
    """Names in the whole episode, in the order of their first reply."""
    turns: list[int] = field(default_factory=list)
    """Numbers of its replies in the whole episode, in the order of the requests."""
    num_tokens: int = 0
    num_begun: int = 0
    is_reached: bool = False
    """Whether it has reached a limit of its own."""
    began_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def begin(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Begin a turn; its sampling settings, with the tokens that are left. Turns side by side may each have those.

        Raises: LimitReached.
        """
        limits, age_s = self.limits, asyncio.get_running_loop().time() - self.began_at
        if limits.max_turns is not None and self.num_begun >= limits.max_turns:
            self._reach(Reason.TURN_LIMIT, f"its {limits.max_turns} turns (max_turns)")
        if limits.timeout_s is not None and age_s >= limits.timeout_s:
            self._reach(Reason.TIME_LIMIT, f"its {limits.timeout_s:g} s (timeout_s)")
        if limits.max_tokens is not None:
            left = limits.max_tokens - self.num_tokens
            if left < 1:
                self._reach(Reason.TOKEN_LIMIT, f"its {limits.max_tokens} tokens (max_tokens)")
            sampling = sampling | {"tokens_left": left}
        self.num_begun += 1
        return sampling

    def _reach(self, reason: Reason, what: str) -> None:
        self.is_reached = True
        raise LimitReached(f"part {self.name!r} has had {what}", reason=reason)

    def own_name(self, agent: str) -> str:
        """The name of an agent as the part's environment knows it."""
        return MAIN_AGENT if agent == self.name else agent.removeprefix(f"{self.name}/")

    def add(self, agent: str, reply: Reply) -> None:
        self.agents[agent] = None
        self.turns.append(reply.turn)
        self.turns.sort()
        self.num_tokens += len(reply.token_ids)


class PartContext(RolloutContext):
    """The policy, as an environment sees it that plays a part."""

    def __init__(self, ctx: RolloutContext, use: Use, level: int, agent: str | None = None) -> None:
        self.level = level
        self._ctx, self._use, self._agent = ctx, use, agent or use.name

    @property
    def sampling(self) -> SamplingSection | None:
        return self._ctx.sampling

    @property
    def episode(self) -> EpisodeInfo | None:
        return self._ctx.episode

    async def generate(
        self, prompt_ids: Int[np.ndarray, " prompt"], tools: list[dict] | None = None, **sampling: Any
    ) -> Reply:
        return self._added(await self._ctx.generate(prompt_ids, tools, **self._use.begin(sampling)))

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        return self._added(await self._ctx.chat(messages, tools, **self._use.begin(sampling)))

    def _added(self, reply: Reply) -> Reply:
        self._use.add(self._agent, reply)
        return reply

    def keep(self, sequences: Sequence[tuple[Int[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]]) -> None:
        raise EnvError(f"part {self._use.name!r}: ctx.keep chooses the sequences of a whole episode, not of a part")

    def agent(self, name: str, *, is_trained: bool = True) -> PartContext:
        name = f"{self._use.name}/{name}"
        return PartContext(self._ctx.agent(name, is_trained=is_trained), self._use, self.level, name)

    def conversation(self, number: int) -> PartContext:
        return PartContext(self._ctx.conversation(number), self._use, self.level, self._agent)

    def model(self, name: str) -> ChatModel:
        return self._ctx.model(name)
