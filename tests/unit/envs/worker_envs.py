"""Environments for tests of worker processes: correct ones, and ones that hang, exit or return wrong values."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from stretto.envs.base import EpisodeLimits, LimitReached, RolloutResult, SingleTurnEnv, TaskSource
from stretto.envs.parts import play_part
from stretto.records.rollout import Task


class Repeat(SingleTurnEnv):
    """Repeat the word; a score takes `slow_s`, without blocking."""

    def __init__(self, num_tasks: int | None = None, slow_s: float = 0.0) -> None:
        self.name, self.num_tasks, self.slow_s = "repeat", num_tasks, slow_s

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(
            lambda i: Task(env=self.name, task_id=f"word-{split}-{i}", data={"word": f"{split}{i}"}), self.num_tasks
        )

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": task.data["word"]}]

    async def score(self, task: Task, text: str) -> RolloutResult:
        await asyncio.sleep(self.slow_s)
        return RolloutResult(reward=float(text == task.data["word"]), metrics={"pid": float(os.getpid())})


class Chain:
    """Repeat a word several times, in a dialogue; a second agent that is not trained takes a turn too."""

    def __init__(self, num_turns: int = 3, max_turns: int | None = None, catches: bool = True) -> None:
        self.name, self.num_turns, self.catches = "chain", num_turns, catches
        self.limits = EpisodeLimits(max_turns=max_turns)

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


class Team(Chain):
    """Speaks itself, and has two other environments played side by side as parts; one of them has an agent more."""

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        await ctx.chat([{"role": "user", "content": "plan"}])
        repeat, chain = Repeat(), Chain(num_turns=2)
        parts = await asyncio.gather(
            play_part(ctx, repeat, repeat.tasks("train").task(3), "repeat"), play_part(ctx, chain, task, "chain")
        )
        return RolloutResult(reward=sum(part.result.reward for part in parts), parts=parts)


class Unruly(Chain):
    """`actions` says by task whether an episode blocks, exits, raises or never ends; other episodes are ordinary."""

    def __init__(self, actions: dict[str, str], once: str | None = None) -> None:
        super().__init__(num_turns=2)
        self.actions = actions
        self.once = once and Path(once)  # a directory that marks actions as done, so that a retry is ordinary

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        await ctx.chat([{"role": "user", "content": "before"}])
        action = self.actions.get(task.task_id.partition("-")[2])
        if action and self.once is not None:
            mark = self.once / task.task_id
            if mark.exists():
                action = None
            mark.touch()
        if action == "block":
            time.sleep(1000)
        elif action == "die":
            os._exit(7)
        elif action == "raise":
            raise KeyError("no such thing")
        elif action == "exit":
            raise SystemExit("not authenticated")
        elif action == "wait":
            await asyncio.Event().wait()
        elif action == "deaf":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        elif action == "lie":
            return 1.0
        return await super().rollout(task, ctx)


class NoTasks(Repeat):
    """Has tasks to train on, but none held out."""

    def tasks(self, split: str) -> TaskSource:
        from stretto.base.errors import ConfigError

        if split == "eval":
            raise ConfigError("no held-out tasks")
        return super().tasks(split)


class Unsendable(Repeat):
    """Its prompt cannot be sent to another process."""

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": object()}]


class Closing(Repeat):
    """Writes a file when it is closed."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        Path(self.mark).write_text("closed")


class Leaky(Repeat):
    """Leaks a megabyte per score, and 400 in the task number `heavy`."""

    def __init__(self, heavy: int | None = None, mark: str | None = None) -> None:
        super().__init__()
        self.heavy, self.mark, self.leaked = heavy, mark, []

    async def score(self, task: Task, text: str) -> RolloutResult:
        is_heavy = task.task_id.endswith(f"-{self.heavy}")
        self.leaked.append(bytearray(os.urandom(1 << 20) * (400 if is_heavy else 1)))
        await asyncio.sleep(30 if is_heavy else 0)
        return await super().score(task, text)

    async def close(self) -> None:
        if self.mark is not None:
            Path(self.mark, str(os.getpid())).touch()
