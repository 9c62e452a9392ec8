"""An environment that does not answer as it did before the resume."""

from __future__ import annotations

from typing import Any, ClassVar

from fakes import GuessEnv

from stretto.envs.base import RolloutResult
from stretto.records.rollout import Task


class Moody(GuessEnv):
    """Three turns; its second message depends on the incarnation of the run."""

    incarnation: ClassVar[int] = 0

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        messages = []
        for turn in range(3):
            mood = self.incarnation if turn == 1 else 0
            messages.append({"role": "user", "content": f"{task.data['word']}{turn}{mood}"})
            messages.append((await ctx.chat(messages)).message)
        return RolloutResult(reward=float(len(messages)))
