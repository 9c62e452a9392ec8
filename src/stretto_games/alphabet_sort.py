"""alphabet-sort: sort some letters, then sort them together with further letters, turn after turn.

The first message is `dab`, answered by `abd`; the second is `+cb`, answered by `abbcd`: every turn builds on
all earlier ones. Reward 1 if every turn is right, else 0. The first wrong turn ends the episode, because no later turn
could change the reward, unless goes_on is true. The metric `turns_right` counts the right turns.

The state before a reply is named by its turn, and by whether one was wrong. It is worth the share of turns that were
right so far, and nothing after a wrong one. With scores_turns a right turn has a reward of its own, one share of the
turns, beside the reward of the episode.
"""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, Reply, RolloutResult
from stretto.envs.bundled.held_out import GeneratedTasks, alphabet_of, assistant, letters_of, user
from stretto.envs.multi_turn import Episode, MultiTurnEnv
from stretto.records.rollout import Task


class AlphabetSort(GeneratedTasks, MultiTurnEnv):
    """num_turns messages of letters_per_turn letters out of the first num_symbols of the alphabet."""

    stream = "alphabet-sort"

    def __init__(
        self,
        num_turns: int = 2,
        letters_per_turn: int = 3,
        num_symbols: int = 16,
        seed: int = 0,
        instruction: str = "",
        scores_turns: bool = False,
        goes_on: bool = False,
    ) -> None:
        if not (1 <= num_turns <= 16 and 1 <= letters_per_turn <= 16):
            raise ConfigError(
                f"alphabet-sort: num_turns = {num_turns} and letters_per_turn = {letters_per_turn} must lie in 1..16."
            )
        self.name = "alphabet-sort"
        self.num_turns, self.letters_per_turn = num_turns, letters_per_turn
        self.alphabet = alphabet_of(num_symbols, "alphabet-sort")
        self.seed = seed
        self.instruction = instruction
        self.scores_turns, self.goes_on = scores_turns, goes_on

    def make_text(self, entropy: int) -> str:
        return letters_of(entropy, self.alphabet, self.num_turns * self.letters_per_turn)

    def task_data(self, text: str) -> dict[str, str]:
        return {"letters": text}

    def prompt(self, task: Task) -> list[Message]:
        return [self._user_message(task.data["letters"], 0)]

    def respond(self, episode: Episode, reply: Reply) -> list[Message] | None:
        turn, letters, state = episode.num_turns, episode.task.data["letters"], episode.state
        if is_right := reply.text.strip() == self._answer(letters, turn - 1):
            state["turns_right"], state["right_turn"] = state.get("turns_right", 0) + 1, turn
        is_over = turn == self.num_turns or not (is_right or self.goes_on)
        return None if is_over else [self._user_message(letters, turn)]

    def turn_reward(self, episode: Episode, reply: Reply) -> float | None:
        is_right = episode.state.get("right_turn") == episode.num_turns  # not so if the reply was cut off
        return is_right / self.num_turns if self.scores_turns else None

    def state_value(self, episode: Episode) -> float:
        return 0.0 if self._has_failed(episode) else episode.num_turns / self.num_turns

    def state_name(self, episode: Episode) -> str:
        return f"{episode.num_turns}{' after a wrong turn' if self._has_failed(episode) else ''}"

    def _has_failed(self, episode: Episode) -> bool:
        return episode.state.get("turns_right", 0) < episode.num_turns

    def score(self, episode: Episode) -> RolloutResult:
        right = episode.state.get("turns_right", 0)
        return RolloutResult(reward=float(right == self.num_turns), metrics={"turns_right": float(right)})

    def solve(self, task: Task) -> dict[str, list[Message]]:
        letters, messages = task.data["letters"], []
        for turn in range(self.num_turns):
            messages += [self._user_message(letters, turn), assistant(self._answer(letters, turn))]
        return {"messages": messages}

    def _user_message(self, letters: str, turn: int) -> Message:
        start = turn * self.letters_per_turn
        prefix = "+" if turn else self.instruction
        return user(prefix + letters[start : start + self.letters_per_turn])

    def _answer(self, letters: str, turn: int) -> str:
        return "".join(sorted(letters[: (turn + 1) * self.letters_per_turn]))
