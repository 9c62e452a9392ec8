"""Shop: what do some things cost together? The policy searches price lists, computes with a tool, and answers in a box.

An episode has several turns: `search` for each thing, `calculate`, then the answer. Reward 1 for the right sum in the
last box, else 0; calling tools is not rewarded by itself. The documents are the files beside this one.
"""

from __future__ import annotations

import re
from pathlib import Path

from stretto.envs.base import EpisodeLimits, Message, RolloutResult, Split, TaskSource
from stretto.envs.bundled.calculator import calculate
from stretto.envs.bundled.held_out import draw_held_out
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
PRICES = {
    m[1]: int(m[2]) for each in SENTENCES if (m := re.fullmatch(r"An? (\w+) costs (\d+) euros\.", each))
}


def words_of(text: str) -> set[str]:
    """The words of a text, without the s of a plural."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", text.lower())}


def search(query: str) -> str:
    """The sentences of the price lists that fit a query best."""
    wanted = words_of(query)
    ranked = sorted(SENTENCES, key=lambda sentence: -len(wanted & words_of(sentence)))
    found = [sentence for sentence in ranked[:MAX_RESULTS] if wanted & words_of(sentence)]
    return " ".join(found) or "Nothing found."


class Shop(ToolEnv):
    """Sums of two prices, each times a number from 2 to 9.

    instruction: text before the question; a network that is trained from scratch on solutions needs none.
    """

    limits = EpisodeLimits(max_turns=6)

    def __init__(self, seed: int = 0, instruction: str = "") -> None:
        self.name = "shop"
        self.seed, self.instruction = seed, instruction
        self.tools = (search, calculate)

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            order = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data={"order": order})

        return TaskSource(make)

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": self._question(task.data["order"])}]

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

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Orders of the training split, solved with two searches and one calculation."""
        return [
            self._solved(self._draw(f"sft/{self.seed}/{seed}", i, is_eval=False)) for i in range(num_rows)
        ]

    def _solved(self, order: str) -> dict:
        sums = "+".join(f"{count}*{PRICES[thing]}" for count, thing in parse(order))
        calls = [("search", {"query": thing}) for _, thing in parse(order)] + [
            ("calculate", {"expression": sums})
        ]
        messages: list[Message] = [{"role": "user", "content": self._question(order)}]
        for name, arguments in calls:
            function = {"name": name, "arguments": arguments}
            result = search(**arguments) if name == "search" else calculate(**arguments)
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "name": name, "content": result},
            ]
        messages.append({"role": "assistant", "content": f"\\boxed{{{total(order)}}}"})
        return {"messages": messages, "tools": self.tool_schemas()}

    def _question(self, order: str) -> str:
        return f"{self.instruction}What do {order} cost?"

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        things = sorted(PRICES)

        def make(entropy: int) -> str:
            entropy, first = divmod(entropy, len(things))
            entropy, gap = divmod(entropy, len(things) - 1)
            entropy, count = divmod(entropy, 8)
            second = things[(first + 1 + gap) % len(things)]
            return f"{count + 2} {things[first]}s and {entropy % 8 + 2} {second}s"

        return draw_held_out(f"shop/{stream}", index, is_eval=is_eval, make=make)


def parse(order: str) -> list[tuple[int, str]]:
    """Numbers and things of an order: `3 mugs and 2 pens` is [(3, "mug"), (2, "pen")]."""
    return [(int(count), thing) for count, thing in re.findall(r"(\d+) (\w+)s\b", order)]


def total(order: str) -> int:
    """What an order costs, in euros."""
    return sum(count * PRICES[thing] for count, thing in parse(order))
