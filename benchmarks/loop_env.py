"""The loop benchmark's environment: random letters in, reward for distinct characters out. Costs next to nothing."""

from __future__ import annotations

import asyncio
import random

from stretto.envs.base import Message, RolloutContext, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.records.rollout import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def prompt_text(index: int, num_letters: int = 16) -> str:
    """The letters of prompt `index`; the same in both systems."""
    return "".join(random.Random(index).choices(LETTERS, k=num_letters))


def distinct_share(text: str) -> float:
    """Share of distinct characters: differs within a group of random completions, so every group has a gradient."""
    return len(set(text)) / max(len(text), 1)


class DistinctLetters(SingleTurnEnv):
    """Prompts of 16 random letters."""

    def __init__(self) -> None:
        self.name = "distinct-letters"

    def tasks(self, split: Split) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"text": prompt_text(i)}))

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task.data["text"]}]

    def score(self, task: Task, text: str) -> float:
        return distinct_share(text)


class SlowLetters(DistinctLetters):
    """The same with a log-normal wait (sigma 1, median latency_s) before every reward."""

    def __init__(self, latency_s: float) -> None:
        super().__init__()
        self.latency_s = latency_s

    async def score(self, task: Task, text: str) -> float:
        await asyncio.sleep(self.latency_s * random.lognormvariate(0.0, 1.0))
        return distinct_share(text)


class TalkingLetters:
    """The same in several turns: the next letters come after a log-normal wait (sigma 1, median latency_s)."""

    def __init__(self, num_turns: int, latency_s: float) -> None:
        self.name, self.num_turns, self.latency_s = "talking-letters", num_turns, latency_s

    def tasks(self, split: Split) -> TaskSource:
        return DistinctLetters().tasks(split)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        messages, replies = [{"role": "user", "content": task.data["text"]}], ""
        for turn in range(self.num_turns):
            reply = await ctx.chat(messages)
            replies += reply.text
            messages += [reply.message, {"role": "user", "content": prompt_text(turn)}]
            await asyncio.sleep(self.latency_s * random.lognormvariate(0.0, 1.0))
        return RolloutResult(reward=distinct_share(replies))
