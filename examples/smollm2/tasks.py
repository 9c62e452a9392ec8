"""Tasks for a language model of 135M parameters: some replies get a reward at the start, and few get all of it.

`Words` is one turn, `Prices` several turns with a tool that is called in plain text, `starts_with` is the reward of the
rows in letters.jsonl. Rewards are graded, so that a group of eight replies nearly always has better and worse ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from stretto.envs.base import EpisodeLimits, Message, Reply, RolloutResult
from stretto.envs.bundled.held_out import GeneratedTasks, assistant, user
from stretto.envs.multi_turn import Episode, MultiTurnEnv
from stretto.records.rollout import Group, Task
from stretto.vime import Sample

QUALITIES = """
big bright brown cold dark dry green happy long loud new old quiet red round sad small soft strange warm
"""
THINGS = """
bird boat book bridge cat chair city cloud coat dog door farm field fish flower forest garden hat horse house island
lake lamp market moon mountain mug river road room school ship song star storm street table train tree window
"""
MIN_WORDS, MAX_WORDS = 3, 8
LETTERS = re.compile(r"[A-Za-z]")


def words_of(text: str) -> list[str]:
    """The words of a text, in small letters: what stands between spaces and has a letter."""
    return [word.strip(".,;:!?\"'()*-").lower() for word in text.split() if LETTERS.search(word)]


def number_reward(text: str, count: int) -> float:
    """1 minus the error divided by `count`, at least 0: words too many, too few, or written twice."""
    words = words_of(text)
    error = max(abs(len(words) - count), abs(len(set(words)) - count))
    return max(0.0, 1 - error / count)


class Words(GeneratedTasks, MultiTurnEnv):
    """A given number of words about a thing, in one turn: `Write 5 words about the old bridge.`

    The reward is 1 minus the error divided by the number, at least 0. A word that is written twice counts as an error,
    so repeating one word gets nothing. A reply must come to its end: one that is cut gets 0, which `Episode` knows and
    the `score` of a `SingleTurnEnv` does not.
    """

    stream = "words"
    limits = EpisodeLimits(max_turns=1)

    def __init__(self, seed: int = 0, system: str = "Be brief.") -> None:
        self.name = "words"
        self.seed, self.system = seed, system

    def make_text(self, entropy: int) -> str:
        entropy, count = divmod(entropy, MAX_WORDS - MIN_WORDS + 1)
        return f"Write {MIN_WORDS + count} words about the {thing_of(entropy)}."

    def task_data(self, text: str) -> dict[str, Any]:
        return {"text": text, "count": int(text.split()[1])}

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": self.system}, user(task.data["text"])]

    def respond(self, episode: Episode, reply: Reply) -> None:
        """Nothing: the episode ends with the first reply."""

    def score(self, episode: Episode) -> RolloutResult:
        reward = 0.0 if episode.is_truncated else number_reward(episode.last_text, episode.task.data["count"])
        return RolloutResult(reward=reward, metrics={"exact": float(reward == 1)})


class PermutedWords(Words):
    """`Words` with the rewards of each group in another order: a control, from which nothing can be learned.

    Held-out tasks keep their rewards.
    """

    async def score_group(self, group: Group, notes: Sequence[Any]) -> list[float] | None:
        """Rewards that belong to other members of the group."""
        if group.task.task_id.startswith("eval"):
            return None
        rewards = [rollout.reward for rollout in group.rollouts]
        random.Random(group.group_id).shuffle(rewards)
        return rewards


class Prices(GeneratedTasks, MultiTurnEnv):
    """What does a thing cost? The policy writes `price(old mug)`, is told, and answers with the number.

    The call is plain text, because the model's chat template has no tools; the first messages show one. Reward 1 for
    the right number after the right call, 0.3 for the call alone, else 0. A price cannot be guessed: it depends on the
    task.
    """

    stream = "prices"
    limits = EpisodeLimits(max_turns=2)

    def __init__(self, seed: int = 0) -> None:
        self.name = "prices"
        self.seed = seed

    def make_text(self, entropy: int) -> str:
        entropy, price = divmod(entropy, 98)
        return f"{thing_of(entropy)}: {price + 2}"

    def task_data(self, text: str) -> dict[str, Any]:
        thing, price = text.split(": ")
        return {"thing": thing, "price": int(price)}

    def prompt(self, task: Task) -> list[Message]:
        return [
            {"role": "system", "content": "To look up a price write price(thing)."},
            user("What does the green cup cost?"),
            assistant("price(green cup)"),
            told(31),
            assistant("31"),
            user(f"What does the {task.data['thing']} cost?"),
        ]

    def respond(self, episode: Episode, reply: Reply) -> list[Message] | None:
        if episode.num_turns == 1 and reply.text.strip() == self.call(episode.task):
            return [told(episode.task.data["price"])]
        return None

    def score(self, episode: Episode) -> RolloutResult:
        """Reward of an episode: only the right call gets a second turn."""
        has_called = episode.num_turns == 2
        is_right = has_called and episode.last_text.strip() == str(episode.task.data["price"])
        return RolloutResult(reward=1.0 if is_right else 0.3 * has_called, metrics={"called": float(has_called)})

    def call(self, task: Task) -> str:
        """The right call."""
        return f"price({task.data['thing']})"


def told(price: int) -> Message:
    """The tool's answer."""
    return {"role": "tool", "content": f"{price} euros"}


def thing_of(entropy: int) -> str:
    """A thing with a quality: `old bridge`."""
    qualities, things = QUALITIES.split(), THINGS.split()
    entropy, quality = divmod(entropy, len(qualities))
    return f"{qualities[quality]} {things[entropy % len(things)]}"


def in_number(args: Any, sample: Sample) -> float:
    """The reward of `Words` for a reply to its prompts, whatever the run's own reward was: for `stretto rescore`."""
    asked = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    count = int(re.findall(r"Write (\d+) words about", asked)[-1])
    return 0.0 if sample.status is Sample.Status.TRUNCATED else number_reward(sample.response, count)


async def starts_with(args: Any, sample: Sample) -> float:
    """The share of the reply that is different words with the record's letter at the start; missing ones count too."""
    words = [word for word in words_of(sample.response) if len(word) > 1]
    fitting = {word for word in words if word.startswith(sample.label)}
    return len(fitting) / max(len(words), sample.metadata["count"])
