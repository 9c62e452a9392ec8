"""A taskset with a tool server, which is started for every rollout."""

import verifiers.v1 as vf


class AddData(vf.TaskData):
    total: int


class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)


class AddTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddTask(vf.Task[AddData, vf.State, AddTaskConfig]):
    @classmethod
    def toolsets(cls, config: AddTaskConfig) -> list[vf.Toolset]:
        return [AddToolset(config.tools)]

    @vf.reward
    async def is_right(self, task: AddData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.total))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class AddConfig(vf.TasksetConfig):
    task: AddTaskConfig = AddTaskConfig()


class AddTaskset(vf.Taskset[AddTask, AddConfig]):
    def load(self):
        return [AddTask(AddData(prompt=f"{i}+{i}", total=2 * i), self.config.task) for i in range(3, 6)]


__all__ = ["AddTaskset"]

if __name__ == "__main__":
    AddToolset.run()
