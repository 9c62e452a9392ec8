"""wordle: find a hidden word by guessing; the answer to a guess says which of its letters are right.

An answer has one sign per letter: the letter in upper case if it is right; in lower case if the word has it in another
place (at most as often as the word has it); `-` if not. Words are any letters out of the first num_symbols of the
alphabet. Reward 1 for the word within max_turns guesses, else 0. A reply that is no word of the right length ends the
game.

The state before a guess is named by the answers so far, in any order. It is worth what they tell of the word: 0 if all
words are possible, 1 if one is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from functools import cached_property

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, Reply, RolloutResult
from stretto.envs.bundled.held_out import GeneratedTasks, alphabet_of, assistant, letters_of, user
from stretto.envs.multi_turn import Episode, MultiTurnEnv
from stretto.records.rollout import Task

MAX_WORDS = 100_000  # `sft_rows` goes through all of them
MAX_VALUED_WORDS = 1_000  # `state_value` goes through all of them, between turns


class Wordle(GeneratedTasks, MultiTurnEnv):
    """Words of word_length letters, to be found with max_turns guesses."""

    stream = "wordle"

    def __init__(
        self, word_length: int = 3, num_symbols: int = 5, max_turns: int = 4, seed: int = 0, instruction: str = "guess"
    ) -> None:
        if not (2 <= num_symbols <= 26 and word_length >= 1 and 64 <= num_symbols**word_length <= MAX_WORDS):
            raise ConfigError(
                f"wordle: word_length = {word_length}, num_symbols = {num_symbols} make "
                f"{num_symbols**word_length} words; change them to make 64 to {MAX_WORDS}."
            )
        if max_turns < 1:
            raise ConfigError(f"wordle: max_turns = {max_turns} must be at least 1.")
        self.name = "wordle"
        self.word_length, self.max_turns = word_length, max_turns
        self.alphabet = alphabet_of(num_symbols, "wordle")
        self.seed = seed
        self.instruction = instruction
        self._fits: dict[str, frozenset[str]] = {}

    def make_text(self, entropy: int) -> str:
        return letters_of(entropy, self.alphabet, self.word_length)

    def task_data(self, text: str) -> dict[str, str]:
        return {"word": text}

    def prompt(self, task: Task) -> list[Message]:
        return [user(self.instruction)]

    def respond(self, episode: Episode, reply: Reply) -> list[Message] | None:
        guess, word = reply.text.strip(), episode.task.data["word"]
        if guess == word:
            episode.state["is_found"] = True
            return None
        is_word = len(guess) == self.word_length and set(guess) <= set(self.alphabet)
        if not is_word or episode.num_turns >= self.max_turns:
            episode.state["is_malformed"] = not is_word
            return None
        signs = compare(guess, word)
        episode.state.setdefault("answers", []).append(f"{guess}={signs}")
        return [user(signs)]

    def state_name(self, episode: Episode) -> str:
        return " ".join(sorted(episode.state.get("answers", [])))

    def state_value(self, episode: Episode) -> float | None:
        if len(self._words) > MAX_VALUED_WORDS:
            return None
        left = self._words.intersection(*map(self._fitting, episode.state.get("answers", [])))
        return 1.0 - math.log(len(left)) / math.log(len(self._words))

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(map("".join, itertools.product(self.alphabet, repeat=self.word_length)))

    def _fitting(self, answer: str) -> frozenset[str]:
        """The words for which a guess has this answer, `guess=signs`."""
        if answer not in self._fits:
            guess, signs = answer.split("=")
            self._fits[answer] = frozenset(word for word in self._words if compare(guess, word) == signs)
        return self._fits[answer]

    def score(self, episode: Episode) -> RolloutResult:
        is_malformed = episode.state.get("is_malformed", False)
        metrics = {"guesses": float(episode.num_turns), "malformed": float(is_malformed)}
        return RolloutResult(reward=float(episode.state.get("is_found", False)), metrics=metrics)

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Won games of the training split, guessed at random among the words that are still possible."""
        words = ["".join(letters) for letters in itertools.product(self.alphabet, repeat=self.word_length)]
        rows: list[dict] = []
        index = 0
        while len(rows) < num_rows:
            word = self.draw_for_sft(seed, index).data["word"]
            if messages := self._play(word, words, random.Random(f"{self.seed}/{seed}/{index}")):
                rows.append({"messages": messages})
            index += 1
        return rows

    def _play(self, word: str, words: list[str], rng: random.Random) -> list[Message] | None:
        messages: list[Message] = [user(self.instruction)]
        possible = words
        for _ in range(self.max_turns):
            guess = rng.choice(possible)
            messages.append(assistant(guess))
            if guess == word:
                return messages
            signs = compare(guess, word)
            messages.append(user(signs))
            possible = [other for other in possible if compare(guess, other) == signs]
        return None


def compare(guess: str, word: str) -> str:
    """The signs of a guess, one for each of its letters."""
    left = Counter(w for g, w in zip(guess, word) if g != w)
    signs = []
    for letter, right in zip(guess, word):
        if letter == right:
            signs.append(letter.upper())
        elif left[letter] > 0:
            left[letter] -= 1
            signs.append(letter)
        else:
            signs.append("-")
    return "".join(signs)
