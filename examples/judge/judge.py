"""The environment of examples/judge: sorting letters, paid by what a frozen model answers to the same prompt."""

from __future__ import annotations

from stretto.envs.base import RunInfo
from stretto.envs.bundled.sort_letters import SortLetters
from stretto.records.rollout import Task
from stretto.vime import Arguments, get_model_url, post
from stretto.vime.arguments import addresses_of


class Judged(SortLetters):
    """The reward of a reply is the share of places in which it has the judge's letter."""

    def __init__(self, run: RunInfo | None = None) -> None:
        super().__init__()
        self.name = "judged"
        run = run or RunInfo()
        self.args = Arguments(**addresses_of(run.engine_urls, run.model_urls))
        self.answers: dict[str, str] = {}  # the judge's, by prompt: it is asked once for each

    async def score(self, task: Task, text: str) -> float:
        letters = task.data["letters"]
        if letters not in self.answers:
            url = get_model_url(self.args, "judge", "/v1/chat/completions")
            messages = [{"role": "user", "content": letters}]
            body = {"model": "judge", "messages": messages, "temperature": 0, "max_tokens": 8}
            output = await post(url, body)
            self.answers[letters] = output["choices"][0]["message"]["content"].strip()
        ours, theirs = text.strip(), self.answers[letters]
        same = sum(left == right for left, right in zip(ours, theirs))
        return same / max(len(ours), len(theirs), 1)
