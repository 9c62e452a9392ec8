"""reverse-text: write a short string backwards. Reward 1 for exactly the right string, else 0."""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, SingleTurnEnv
from stretto.envs.bundled.held_out import SolvedTasks, alphabet_of, letters_of, user
from stretto.records.rollout import Task


class ReverseText(SolvedTasks, SingleTurnEnv):
    """Strings of min_length..max_length letters, each length equally likely; `instruction` precedes them."""

    stream = "reverse"

    def __init__(
        self, min_length: int = 3, max_length: int = 6, num_symbols: int = 16, seed: int = 0, instruction: str = ""
    ) -> None:
        if not 1 <= min_length <= max_length <= 64:
            raise ConfigError(
                f"reverse-text: min_length = {min_length}, max_length = {max_length} must lie in 1..64, in this order."
            )
        self.name = "reverse-text"
        self.min_length = min_length
        self.max_length = max_length
        self.alphabet = alphabet_of(num_symbols, "reverse-text")
        self.seed = seed
        self.instruction = instruction

    def make_text(self, entropy: int) -> str:
        entropy, extra = divmod(entropy, self.max_length - self.min_length + 1)
        return letters_of(entropy, self.alphabet, self.min_length + extra)

    def task_data(self, text: str) -> dict[str, str]:
        return {"text": text}

    def prompt(self, task: Task) -> list[Message]:
        return [user(self.instruction + task.data["text"])]

    def score(self, task: Task, text: str) -> float:
        return float(text.strip() == self.demonstration(task))

    def demonstration(self, task: Task) -> str:
        """The answer, which `opsd` shows to the teacher."""
        return task.data["text"][::-1]
