"""reverse-text: write a short string backwards. Reward 1 for exactly the right string, else 0."""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, SingleTurnEnv, Split, TaskSource
from stretto.envs.bundled.held_out import draw_held_out, letters_of
from stretto.records.rollout import Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class ReverseText(SingleTurnEnv):
    """Strings of min_length..max_length letters, each length equally likely; `instruction` precedes them."""

    def __init__(
        self,
        min_length: int = 3,
        max_length: int = 6,
        num_symbols: int = 16,
        seed: int = 0,
        instruction: str = "",
    ) -> None:
        if not 1 <= min_length <= max_length <= 64:
            raise ConfigError(
                f"reverse-text: min_length = {min_length}, max_length = {max_length} must lie in 1..64, in this order."
            )
        if not 2 <= num_symbols <= 26:
            raise ConfigError(f"reverse-text: num_symbols = {num_symbols} must lie in 2..26.")
        self.name = "reverse-text"
        self.min_length = min_length
        self.max_length = max_length
        self.alphabet = ALPHABET[:num_symbols]
        self.seed = seed
        self.instruction = instruction

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            text = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data={"text": text})

        return TaskSource(make)

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": self.instruction + task.data["text"]}]

    def score(self, task: Task, text: str) -> float:
        return float(text.strip() == task.data["text"][::-1])

    def demonstration(self, task: Task) -> str:
        """The answer, for `opsd`."""
        return task.data["text"][::-1]

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Solved tasks of the training split."""
        rows = []
        for index in range(num_rows):
            text = self._draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
            answer = {"role": "assistant", "content": text[::-1]}
            rows.append({"messages": [{"role": "user", "content": self.instruction + text}, answer]})
        return rows

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        num_lengths = self.max_length - self.min_length + 1

        def make(entropy: int) -> str:
            entropy, extra = divmod(entropy, num_lengths)
            return letters_of(entropy, self.alphabet, self.min_length + extra)

        return draw_held_out(f"reverse/{stream}", index, is_eval=is_eval, make=make)
