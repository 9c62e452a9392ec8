"""Two boxes with letters, which a tool shows; a frozen model says how good the answers are."""

import random

from stretto.envs.base import EpisodeLimits, RolloutResult, RunInfo, TaskSource
from stretto.envs.multi_turn import Episode, ToolEnv
from stretto.records.rollout import Task


def look(box: int, episode: Episode) -> str:
    """The letters in a box."""
    return episode.task.data["boxes"][box - 1]


class Boxes(ToolEnv):
    """Say the letters of two boxes in order, one box after the other."""

    limits = EpisodeLimits(max_turns=6)
    tools = (look,)

    def __init__(self, run: RunInfo | None = None) -> None:
        self.name = "boxes"
        self.run = run or RunInfo()

    def tasks(self, split):
        return TaskSource(lambda i: self.task(f"{split}-{i}"))

    def task(self, task_id):
        rng = random.Random(task_id)
        boxes = ["".join(rng.sample("abcdefgh", 4)) for _ in range(2)]
        return Task(env=self.name, task_id=task_id, data={"boxes": boxes})

    def prompt(self, task):
        return "1"

    def respond(self, episode, reply):
        answers = episode.state.setdefault("answers", [])
        answers.append(reply.text.strip())
        return [{"role": "user", "content": "2"}] if len(answers) == 1 else None

    async def score(self, episode):
        boxes, answers = episode.task.data["boxes"], episode.state.get("answers", [])
        grades = [await self.grade(*each) for each in zip(boxes, answers)]
        right = [answer == "".join(sorted(box)) for box, answer in zip(boxes, answers)]
        return RolloutResult(reward=sum(grades) / 2, metrics={"right": sum(right) / 2})

    async def grade(self, box, answer):
        """The share of places in which an answer is what the judge says."""
        said = await self.run.model("judge").chat([{"role": "user", "content": box}], max_tokens=6)
        judged = said.text.strip()
        return sum(a == b for a, b in zip(judged, answer)) / max(len(judged), len(answer), 1)

    def sft_rows(self, num_rows, seed):
        return [self.solved(self.task(f"sft-{seed}-{i}")) for i in range(num_rows)]

    def solved(self, task):
        messages = []
        for number, box in enumerate(task.data["boxes"], 1):
            call = {"type": "function", "function": {"name": "look", "arguments": {"box": number}}}
            messages += [
                {"role": "user", "content": str(number)},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "look", "content": box},
                {"role": "assistant", "content": "".join(sorted(box))},
            ]
        return {"messages": messages, "tools": self.tool_schemas()}
