"""Environments whose reward is a frozen model's answer, at each of the places where one may be asked."""

from __future__ import annotations

from stretto.base.errors import EngineError
from stretto.envs.base import RolloutResult, RunInfo, SingleTurnEnv, TaskSource
from stretto.envs.multi_turn import MultiTurnEnv
from stretto.records.rollout import Task


class Judged(SingleTurnEnv):
    """One turn: `score` asks the judge, which the environment has from `run`."""

    def __init__(self, run: RunInfo | None = None, model: str = "judge") -> None:
        self.name = "judged"
        self.run, self.model = run or RunInfo(), model

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": f"w{i}"}), 8)

    def prompt(self, task: Task) -> str:
        return task.data["word"]

    async def score(self, task: Task, text: str) -> RolloutResult:
        reply = await self.run.model(self.model).chat([{"role": "user", "content": f"{task.data['word']} -> {text}"}])
        return RolloutResult(reward=float(reply.text), metrics={"tokens": reply.num_completion_tokens})


class JudgedTurns(MultiTurnEnv):
    """Two turns: the judge answers the first reply through `ctx`, and nobody dies if it does not."""

    def __init__(self, model: str = "judge") -> None:
        self.name, self.model = "judged-turns", model

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={}), 8)

    def prompt(self, task: Task) -> str:
        return "a"

    def respond(self, episode, reply):
        return None

    def score(self, episode) -> float:
        return 0.0

    async def rollout(self, task: Task, ctx) -> RolloutResult:
        reply = await ctx.chat([{"role": "user", "content": "a"}])
        try:
            judged = await ctx.model(self.model).chat([{"role": "user", "content": reply.text}], max_tokens=4)
        except EngineError:
            return RolloutResult(reward=-1.0)
        return RolloutResult(reward=float(judged.text))
