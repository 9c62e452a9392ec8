"""Tasks made from random numbers, split into training and held-out tasks that never overlap.

A task is a text, and its hash decides whether it is held out (1 in 16 of all texts), not when it was drawn. So no
held-out task is ever trained on, however many tasks are drawn, in any process and run.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import Any

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, Split, TaskSource
from stretto.records.rollout import Task

EVAL_SHARE = 16
"""One text in this many is held out."""


class GeneratedTasks(ABC):
    """The tasks of an environment, and solved ones for `sft`."""

    name: str
    seed: int
    stream: str
    """Name of the environment's random numbers."""

    @abstractmethod
    def make_text(self, entropy: int) -> str:
        """The text of a task, made from a random integer."""

    @abstractmethod
    def task_data(self, text: str) -> dict[str, Any]:
        """The data of the task with this text."""

    def tasks(self, split: Split) -> TaskSource:
        """The tasks of one split: to train on, or held out."""

        def make(index: int) -> Task:
            text = self.draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data=self.task_data(text))

        return TaskSource(make)

    def sft_rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        """Solved tasks of the training split."""
        return [self.solve(self.draw_for_sft(seed, index)) for index in range(num_rows)]

    def solve(self, task: Task) -> dict[str, Any]:
        """A row for `sft` that shows how this task is solved."""
        raise NotImplementedError

    def draw_for_sft(self, seed: int, index: int) -> Task:
        """Task number `index` of the training split, drawn for `sft`."""
        text = self.draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
        return Task(env=self.name, task_id=f"sft-{index}", data=self.task_data(text))

    def draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        """Text number `index` of a stream: the first that is held out, or is not."""
        attempt = 0
        while True:
            text = self.make_text(_digest(f"{self.stream}/{stream}/{index}/{attempt}"))
            if is_held_out(text) == is_eval:
                return text
            attempt += 1


class SolvedTasks(GeneratedTasks):
    """Tasks of one turn, which one reply solves."""

    @abstractmethod
    def prompt(self, task: Task) -> list[Message]:
        """The task, as the policy sees it."""

    @abstractmethod
    def demonstration(self, task: Task) -> str:
        """A reply that gets the full reward."""

    def solve(self, task: Task) -> dict[str, Any]:
        """A row for `sft`: the prompt, and the right reply."""
        return {"messages": [*self.prompt(task), assistant(self.demonstration(task))]}


def is_held_out(text: str) -> bool:
    """Is the task with this text held out?"""
    return _digest("side/" + text) % EVAL_SHARE == 0


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """A message of the policy."""
    return {"role": "assistant", "content": text}


def alphabet_of(num_symbols: int, env: str) -> str:
    """The first num_symbols letters of the alphabet; `env` is for messages.

    Raises: ConfigError if there are not that many, or fewer than two.
    """
    if not 2 <= num_symbols <= 26:
        raise ConfigError(f"{env}: num_symbols = {num_symbols} must lie in 2..26.")
    return string.ascii_lowercase[:num_symbols]


def letters_of(entropy: int, alphabet: str, length: int) -> str:
    """`length` letters, each drawn with replacement, from the digits of `entropy` in base len(alphabet)."""
    base = len(alphabet)
    letters = []
    for _ in range(length):
        entropy, digit = divmod(entropy, base)
        letters.append(alphabet[digit])
    return "".join(letters)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=64).digest(), "little")
