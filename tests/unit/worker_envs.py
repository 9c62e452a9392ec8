"""Environments for tests of worker processes: well-behaved ones, and ones that hang, die or lie."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from stretto.envs.base import LimitReached, Limits, RolloutResult, SingleTurnEnv, TaskSource
from stretto.records.rollout import Task


class Repeat(SingleTurnEnv):
    """Say the word again; `slow_s` is how long a score takes, without blocking."""

    def __init__(self, num_tasks: int | None = None, slow_s: float = 0.0) -> None:
        self.name, self.num_tasks, self.slow_s = "repeat", num_tasks, slow_s

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(
            lambda i: Task(env=self.name, task_id=f"word-{split}-{i}", data={"word": f"{split}{i}"}),
            self.num_tasks,
        )

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": task.data["word"]}]

    async def score(self, task: Task, text: str) -> RolloutResult:
        await asyncio.sleep(self.slow_s)
        return RolloutResult(reward=float(text == task.data["word"]), metrics={"pid": float(os.getpid())})


class Chain:
    """Repeat a word several times, in a dialogue; a side player who is not trained speaks too."""

    def __init__(self, num_turns: int = 3, max_turns: int | None = None, catches: bool = True) -> None:
        self.name, self.num_turns, self.catches = "chain", num_turns, catches
        self.limits = Limits(max_turns=max_turns)

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": f"w{i}"}), 100)

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        messages: list[dict] = []
        right = 0
        try:
            for turn in range(self.num_turns):
                messages.append({"role": "user", "content": f"{task.data['word']}{turn}"})
                reply = await ctx.chat(messages)
                right += reply.text == f"{task.data['word']}{turn}"
                messages.append(reply.message)
            await ctx.agent("side", is_trained=False).chat(messages[:1])
        except LimitReached:
            if not self.catches:
                raise
            return RolloutResult(reward=0.5, is_truncated=True)
        return RolloutResult(reward=right / self.num_turns, agent_rewards={"side": 0.0})


class Unruly(Chain):
    """By the number of its task an episode blocks, dies, raises, never ends, or is an ordinary one."""

    def __init__(self, deeds: dict[str, str], once: str | None = None) -> None:
        super().__init__(num_turns=2)
        self.deeds = deeds
        self.once = once and Path(once)  # a directory: what is done once is not done again

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        await ctx.chat([{"role": "user", "content": "before"}])
        deed = self.deeds.get(task.task_id.partition("-")[2])
        if deed and self.once is not None:
            mark = self.once / task.task_id
            if mark.exists():
                deed = None
            mark.touch()
        if deed == "block":
            time.sleep(1000)
        elif deed == "die":
            os._exit(7)
        elif deed == "raise":
            raise KeyError("no such thing")
        elif deed == "exit":
            raise SystemExit("not authenticated")
        elif deed == "wait":
            await asyncio.Event().wait()
        elif deed == "deaf":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        elif deed == "lie":
            return 1.0
        return await super().rollout(task, ctx)


class NoTasks(Repeat):
    """Has tasks to train on and no others."""

    def tasks(self, split: str) -> TaskSource:
        from stretto.base.errors import ConfigError

        if split == "eval":
            raise ConfigError("no held-out tasks")
        return super().tasks(split)


class Unsendable(Repeat):
    """Its prompt cannot cross to another process."""

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": object()}]


class Closing(Repeat):
    """Leaves a mark when it is closed in good order."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        Path(self.mark).write_text("closed")
