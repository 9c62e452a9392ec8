"""A taskset without an end."""

import itertools

import verifiers.v1 as vf


class EndlessTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def reward(self) -> float:
        return 1.0


class EndlessTaskset(vf.Taskset[EndlessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield EndlessTask(vf.TaskData(prompt=str(i)), self.config.task)


__all__ = ["EndlessTaskset"]
