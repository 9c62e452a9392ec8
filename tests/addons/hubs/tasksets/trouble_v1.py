"""A taskset whose tasks fail in different ways."""

import asyncio

import verifiers.v1 as vf


class TroubleData(vf.TaskData):
    what: str


class TroubleTask(vf.Task[TroubleData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.what == "setup":
            raise RuntimeError("no world")

    @vf.reward
    async def reward(self, task: TroubleData, trace: vf.Trace) -> float:
        if task.what == "score":
            raise ValueError("no verdict")
        if task.what == "late":
            await asyncio.sleep(60)
        if task.what == "nan":
            return float("nan")
        return 1.0


WHAT = ["fine", "setup", "score", "late", "nan"]


class TroubleTaskset(vf.Taskset[TroubleTask, vf.TasksetConfig]):
    def load(self):
        return [TroubleTask(TroubleData(prompt=what, what=what), self.config.task) for what in WHAT]


__all__ = ["TroubleTaskset"]
