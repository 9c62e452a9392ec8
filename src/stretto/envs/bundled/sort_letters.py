"""sort-letters: put a few letters into alphabetical order; reward 1 for exactly that, else 0.

This is the task of `make demo`: a model of 0.1M parameters that has seen a few thousand solutions gets a third of the
tasks right when sampled, and reinforcement learning takes it to nearly all. There is no partial credit, which would
hide what is not yet learned.
"""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, SingleTurnEnv, Split, TaskSource
from stretto.envs.bundled.held_out import draw_held_out, letters_of
from stretto.records.rollout import Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class SortLetters(SingleTurnEnv):
    """num_letters letters out of the first num_symbols of the alphabet, with repeats, after `instruction`."""

    def __init__(
        self, num_letters: int = 6, num_symbols: int = 16, seed: int = 0, instruction: str = ""
    ) -> None:
        if not 1 <= num_letters <= 64:
            raise ConfigError(f"sort-letters: num_letters = {num_letters} must lie in 1..64.")
        if not 2 <= num_symbols <= 26:
            raise ConfigError(f"sort-letters: num_symbols = {num_symbols} must lie in 2..26.")
        self.name = "sort-letters"
        self.num_letters = num_letters
        self.alphabet = ALPHABET[:num_symbols]
        self.seed = seed
        self.instruction = instruction

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            letters = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data={"letters": letters})

        return TaskSource(make)

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": self.instruction + task.data["letters"]}]

    def score(self, task: Task, text: str) -> float:
        return float(text.strip() == "".join(sorted(task.data["letters"])))

    def demonstration(self, task: Task) -> str:
        """The answer, which `opsd` shows to the teacher."""
        return "".join(sorted(task.data["letters"]))

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Solved tasks of the training split."""
        rows = []
        for index in range(num_rows):
            letters = self._draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
            answer = {"role": "assistant", "content": "".join(sorted(letters))}
            rows.append({"messages": [{"role": "user", "content": self.instruction + letters}, answer]})
        return rows

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        def make(entropy: int) -> str:
            return letters_of(entropy, self.alphabet, self.num_letters)

        return draw_held_out(f"sort/{stream}", index, is_eval=is_eval, make=make)
