"""Shop: what do some things cost together? The policy searches price lists, computes with a tool, and answers in a box.

An episode has several turns: `search` for each thing, `calculate`, then the answer. Reward 1 for the right sum in the
last box, else 0; calling tools is not rewarded by itself. The documents are the files beside this one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stretto.envs.base import EpisodeLimits, Message, RolloutResult
from stretto.envs.bundled.calculator import calculate
from stretto.envs.bundled.held_out import GeneratedTasks, assistant, user
from stretto.envs.multi_turn import Episode, ToolEnv
from stretto.envs.rewards.math_reward import boxed, number
from stretto.records.rollout import Task

DOCUMENTS = Path(__file__).parent / "documents"
MAX_RESULTS = 2


def sentences_of(directory: Path) -> list[str]:
    """All sentences of the documents, in order."""
    texts = [file.read_text() for file in sorted(directory.glob("*.txt"))]
    return [sentence.strip() for text in texts for sentence in re.findall(r"[^.]+\.", text)]


SENTENCES = sentences_of(DOCUMENTS)
PRICES = {m[1]: int(m[2]) for each in SENTENCES if (m := re.fullmatch(r"An? (\w+) costs (\d+) euros\.", each))}


def words_of(text: str) -> set[str]:
    """The words of a text, without the s of a plural."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", text.lower())}


def search(query: str) -> str:
    """The sentences of the price lists that fit a query best."""
    wanted = words_of(query)
    ranked = sorted(SENTENCES, key=lambda sentence: -len(wanted & words_of(sentence)))
    found = [sentence for sentence in ranked[:MAX_RESULTS] if wanted & words_of(sentence)]
    return " ".join(found) or "Nothing found."


class Shop(GeneratedTasks, ToolEnv):
    """Sums of two prices, each times a number from 2 to 9.

    instruction: text before the question; a network that is trained from scratch on solutions needs none.
    """

    stream = "shop"
    limits = EpisodeLimits(max_turns=6)

    def __init__(self, seed: int = 0, instruction: str = "") -> None:
        self.name = "shop"
        self.seed, self.instruction = seed, instruction
        self.tools = (search, calculate)

    def make_text(self, entropy: int) -> str:
        things = sorted(PRICES)
        entropy, first = divmod(entropy, len(things))
        entropy, gap = divmod(entropy, len(things) - 1)
        entropy, count = divmod(entropy, 8)
        second = things[(first + 1 + gap) % len(things)]
        return f"{count + 2} {things[first]}s and {entropy % 8 + 2} {second}s"

    def task_data(self, text: str) -> dict[str, str]:
        return {"order": text}

    def prompt(self, task: Task) -> list[Message]:
        return [user(f"{self.instruction}What do {task.data['order']} cost?")]

    def score(self, episode: Episode) -> RolloutResult:
        answer = number(boxed(episode.last_text) or "")
        calls = [call for m in episode.messages for call in m.get("tool_calls", ())]
        results = [m["content"] for m in episode.messages if m["role"] == "tool"]
        names = [call["function"]["name"] for call in calls]
        return RolloutResult(
            reward=float(answer == total(episode.task.data["order"])),
            metrics={
                "searches": float(names.count("search")),
                "calculations": float(names.count("calculate")),
                "errors": float(sum(result.startswith("Error") for result in results)),
            },
        )

    def solve(self, task: Task) -> dict[str, Any]:
        """A row for `sft`: an order, solved with two searches and one calculation."""
        order = parse(task.data["order"])
        sums = "+".join(f"{count}*{PRICES[thing]}" for count, thing in order)
        calls = [*(("search", {"query": thing}) for _, thing in order), ("calculate", {"expression": sums})]
        messages = self.prompt(task)
        for name, arguments in calls:
            function = {"name": name, "arguments": arguments}
            result = search(**arguments) if name == "search" else calculate(**arguments)
            messages += [
                assistant("") | {"tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "name": name, "content": result},
            ]
        messages.append(assistant(f"\\boxed{{{total(task.data['order'])}}}"))
        return {"messages": messages, "tools": self.tool_schemas()}


def parse(order: str) -> list[tuple[int, str]]:
    """Numbers and things of an order: `3 mugs and 2 pens` is [(3, "mug"), (2, "pen")]."""
    return [(int(count), thing) for count, thing in re.findall(r"(\d+) (\w+)s\b", order)]


def total(order: str) -> int:
    """What an order costs, in euros."""
    return sum(count * PRICES[thing] for count, thing in parse(order))
