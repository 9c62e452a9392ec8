"""alphabet-sort: sort some letters, then sort them together with further letters, turn after turn.

The first message is `dab`, answered by `abd`; the second is `+cb`, answered by `abbcd`: every turn builds on
all earlier ones. Reward 1 if every turn is right, else 0. The first wrong turn ends the episode, because no later turn
could change the reward. The metric `turns_right` counts the right turns.
"""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, Reply, RolloutResult, Split, TaskSource
from stretto.envs.bundled.held_out import draw_held_out, letters_of
from stretto.envs.multi_turn import Episode, MultiTurnEnv
from stretto.records.rollout import Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class AlphabetSort(MultiTurnEnv):
    """num_turns messages of letters_per_turn letters out of the first num_symbols of the alphabet."""

    def __init__(
        self,
        num_turns: int = 2,
        letters_per_turn: int = 3,
        num_symbols: int = 16,
        seed: int = 0,
        instruction: str = "",
    ) -> None:
        if not (1 <= num_turns <= 16 and 1 <= letters_per_turn <= 16):
            raise ConfigError(
                f"alphabet-sort: num_turns = {num_turns} and letters_per_turn = {letters_per_turn} must lie in 1..16."
            )
        if not 2 <= num_symbols <= 26:
            raise ConfigError(f"alphabet-sort: num_symbols = {num_symbols} must lie in 2..26.")
        self.name = "alphabet-sort"
        self.num_turns, self.letters_per_turn = num_turns, letters_per_turn
        self.alphabet = ALPHABET[:num_symbols]
        self.seed = seed
        self.instruction = instruction

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            letters = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data={"letters": letters})

        return TaskSource(make)

    def prompt(self, task: Task) -> list[Message]:
        return [self._user_message(task.data["letters"], 0)]

    def respond(self, episode: Episode, reply: Reply) -> list[Message] | None:
        turn, letters = episode.num_turns, episode.task.data["letters"]
        if reply.text.strip() != self._answer(letters, turn - 1):
            return None
        episode.state["turns_right"] = turn
        return [self._user_message(letters, turn)] if turn < self.num_turns else None

    def score(self, episode: Episode) -> RolloutResult:
        right = episode.state.get("turns_right", 0)
        return RolloutResult(reward=float(right == self.num_turns), metrics={"turns_right": float(right)})

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Solved episodes of the training split."""
        rows = []
        for index in range(num_rows):
            letters = self._draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
            messages = []
            for turn in range(self.num_turns):
                answer = {"role": "assistant", "content": self._answer(letters, turn)}
                messages += [self._user_message(letters, turn), answer]
            rows.append({"messages": messages})
        return rows

    def _user_message(self, letters: str, turn: int) -> Message:
        start = turn * self.letters_per_turn
        prefix = f"{'' if turn else self.instruction}{'+' if turn else ''}"
        return {"role": "user", "content": prefix + letters[start : start + self.letters_per_turn]}

    def _answer(self, letters: str, turn: int) -> str:
        return "".join(sorted(letters[: (turn + 1) * self.letters_per_turn]))

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        def make(entropy: int) -> str:
            return letters_of(entropy, self.alphabet, self.num_turns * self.letters_per_turn)

        return draw_held_out(f"alphabet-sort/{stream}", index, is_eval=is_eval, make=make)
