"""sort-letters: put a few letters into alphabetical order; reward 1 for exactly that, else 0.

This is the task of `make demo`: a model of 0.1M parameters that has seen a few thousand solutions gets a third of the
tasks right when sampled, and reinforcement learning takes it to nearly all. There is no partial credit, which would
hide what is not yet learned.
"""

from __future__ import annotations

from collections.abc import Awaitable

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, SingleTurnEnv
from stretto.envs.bundled.held_out import SolvedTasks, alphabet_of, letters_of, user
from stretto.records.rollout import Task


class SortLetters(SolvedTasks, SingleTurnEnv):
    """num_letters letters out of the first num_symbols of the alphabet, with repeats, after `instruction`."""

    stream = "sort"

    def __init__(self, num_letters: int = 6, num_symbols: int = 16, seed: int = 0, instruction: str = "") -> None:
        if not 1 <= num_letters <= 64:
            raise ConfigError(f"sort-letters: num_letters = {num_letters} must lie in 1..64.")
        self.name = "sort-letters"
        self.num_letters = num_letters
        self.alphabet = alphabet_of(num_symbols, "sort-letters")
        self.seed = seed
        self.instruction = instruction

    def make_text(self, entropy: int) -> str:
        return letters_of(entropy, self.alphabet, self.num_letters)

    def task_data(self, text: str) -> dict[str, str]:
        return {"letters": text}

    def prompt(self, task: Task) -> list[Message]:
        return [user(self.instruction + task.data["letters"])]

    def score(self, task: Task, text: str) -> float | Awaitable[float]:
        return float(text.strip() == self.demonstration(task))

    def demonstration(self, task: Task) -> str:
        """The answer, which `opsd` shows to the teacher."""
        return "".join(sorted(task.data["letters"]))
