"""The environment of examples/judge: sorting letters, paid by what a frozen model answers to the same prompt."""

from __future__ import annotations

from stretto.envs.base import RunInfo
from stretto.envs.bundled.sort_letters import SortLetters
from stretto.records.rollout import Task


class Judged(SortLetters):
    """The reward of a reply is the share of places in which it has the judge's letter."""

    def __init__(self, run: RunInfo | None = None) -> None:
        super().__init__()
        self.name = "judged"
        self.judge = (run or RunInfo()).model("judge")

    async def score(self, task: Task, text: str) -> float:
        # Greedy by default, so that the replies of a group ask the judge once.
        reply = await self.judge.chat([{"role": "user", "content": task.data["letters"]}], max_tokens=8)
        ours, theirs = text.strip(), reply.text.strip()
        same = sum(left == right for left, right in zip(ours, theirs))
        return same / max(len(ours), len(theirs), 1)
