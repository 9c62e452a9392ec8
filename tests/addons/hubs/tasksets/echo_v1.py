"""A single-turn taskset: repeat the word."""

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    word: str


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=2.0)
    async def is_same(self, task: EchoData, trace: vf.Trace) -> float:
        if task.word == "raise3":
            raise ValueError("cannot be scored")
        return float(trace.last_reply == task.word)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class EchoConfig(vf.TasksetConfig):
    prefix: str = "w"
    num_tasks: int = 6
    system: str | None = None


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    def load(self):
        for i in range(self.config.num_tasks):
            word = f"{self.config.prefix}{i}"
            yield EchoTask(
                EchoData(id=f"echo-{i}", prompt=word, word=word, system_prompt=self.config.system), self.config.task
            )


__all__ = ["EchoTaskset"]
