"""Environments that misbehave, or that need no learned skill; the runs under test load them as `envs:<class>`."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from zlib import crc32

from stretto.envs.base import Reply, RolloutContext, RolloutResult, SingleTurnEnv, TaskSource
from stretto.envs.bundled.sort_letters import SortLetters
from stretto.envs.multi_turn import Episode, MultiTurnEnv
from stretto.envs.parts import play_part
from stretto.records.rollout import Task


class HeldSort(SortLetters):
    """sort-letters whose scores after the first `num_free` wait for a file, every second task's.

    A test can act in the middle of a step, however fast the run is. `<gate>.held` says that one waits.
    """

    def __init__(self, num_letters: int, gate: str, num_free: int) -> None:
        super().__init__(num_letters=num_letters)
        self.gate, self.num_free = Path(gate), num_free

    async def score(self, task: Task, text: str) -> float:
        self.num_free -= 1
        if self.num_free < 0 and int(task.task_id.rpartition("-")[2]) % 2:
            while not self.gate.exists():
                Path(f"{self.gate}.held").touch()
                await asyncio.sleep(0.01)
        return super().score(task, text)


class Gated(SortLetters):
    """sort-letters whose tasks and rows wait for a file: until it is there, a run is still starting."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = Path(gate)

    def _wait(self) -> None:
        while not self.gate.exists():
            time.sleep(0.01)

    def tasks(self, split: str) -> TaskSource:
        self._wait()
        return super().tasks(split)

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        self._wait()
        return super().sft_rows(num_rows, seed)


class Vowels(SingleTurnEnv):
    """Reward: the share of vowels in the reply. Even a random network's replies differ in it."""

    name = "vowels"

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": f"{i:x}"}))

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": task.data["word"]}]

    def score(self, task: Task, text: str) -> float:
        return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


class Broken(Vowels):
    """Every rollout raises."""

    name = "broken"

    def score(self, task: Task, text: str) -> float:
        raise RuntimeError("the judge is on holiday")


class Flaky(Vowels):
    """About `share` of all rollouts raise, by what was replied."""

    name = "flaky"

    def __init__(self, share: float) -> None:
        self.share = share

    def score(self, task: Task, text: str) -> float:
        if crc32(f"{task.task_id}/{text}".encode()) % 1000 < 1000 * self.share:
            raise ValueError("this reply cannot be judged")
        return super().score(task, text)


class Hanging(Vowels):
    """Every `every`-th task's episodes never end; None: those of all tasks."""

    name = "hanging"

    def __init__(self, every: int | None = None) -> None:
        self.every = every

    async def score(self, task: Task, text: str) -> float:
        number = int(task.task_id.rpartition("-")[2])
        if self.every is None or number % self.every == 0:
            await asyncio.Event().wait()
        return super().score(task, text)


class Dialogue:
    """Three turns, each an echo of what was said with a question added; reward as in Vowels, over all turns."""

    name = "dialogue"

    def __init__(self, max_tokens: int | None = None, gate: str | None = None, num_free: int = 0) -> None:
        """max_tokens: of a reply; each has a length of its own, from half of that, so that few turns end together.

        gate: a file that the rollouts after the first `num_free` wait for, one half of them before their second turn,
        the other before their third: a test can act in the middle of rollouts, however fast the run is.
        """
        self.max_tokens = max_tokens
        self.gate = None if gate is None else Path(gate)
        self.num_free, self.num_started = num_free, 0

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": f"{i:x}"}))

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        messages = Vowels().prompt(task)
        texts: list[str] = []
        self.num_started += 1
        is_free, held_turn = self.num_started <= self.num_free, 1 + self.num_started % 2
        for turn in range(3):
            while self.gate is not None and not is_free and turn == held_turn and not self.gate.exists():
                await asyncio.sleep(0.01)
            await self.pause()
            reply = await ctx.chat(messages, **self._length("".join(texts)))
            texts.append(reply.text)
            messages = [*messages, reply.message, {"role": "user", "content": "and then"}]
        return RolloutResult(reward=Vowels().score(task, "".join(texts)))

    async def pause(self) -> None:
        """Before each turn."""

    def _length(self, said: str) -> dict[str, int]:
        if self.max_tokens is None:
            return {}
        shortest = self.max_tokens // 2
        return {"max_tokens": shortest + crc32(said.encode()) % (self.max_tokens - shortest)}


class Delayed(Dialogue):
    """Waits before each turn, never twice the same: turns meet others in the engine than in another run."""

    name = "delayed"

    def __init__(self, most_s: float = 0.05) -> None:
        super().__init__(max_tokens=12)
        self.most_s = most_s

    async def pause(self) -> None:
        await asyncio.sleep(self.most_s * secrets.randbelow(1000) / 1000)


class VowelTurns(MultiTurnEnv):
    """Three turns, each rewarded with its share of vowels; the rollout itself has no reward."""

    def __init__(self) -> None:
        self.name = "vowel-turns"

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": f"{i:x}"}))

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": task.data["word"]}]

    def respond(self, episode: Episode, reply: Reply) -> list[dict] | None:
        return None if episode.num_turns == 3 else [{"role": "user", "content": "and then"}]

    def turn_reward(self, episode: Episode, reply: Reply) -> float:
        return Vowels().score(episode.task, reply.text)

    def score(self, episode: Episode) -> float:
        return 0.0


class Patient(VowelTurns):
    """The same with twelve turns, and a tool that takes its time before each of them."""

    name = "patient"

    async def respond(self, episode: Episode, reply: Reply) -> list[dict[str, str]] | None:
        await asyncio.sleep(8.0)
        return [{"role": "user", "content": "a"}] if episode.num_turns < 12 else None


class Team:
    """A word said by the policy itself, and two parts side by side, one of them of several turns; each for itself."""

    name = "team"

    def tasks(self, split: str) -> TaskSource:
        return Vowels.tasks(self, split)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        reply = await ctx.chat([{"role": "user", "content": task.data["word"]}])
        parts = await asyncio.gather(
            play_part(ctx, Vowels(), task, "one"), play_part(ctx, VowelTurns(), task, "several")
        )
        return RolloutResult(reward=Vowels().score(task, reply.text), parts=parts)
