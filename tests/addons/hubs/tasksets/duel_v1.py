"""Two agents in one episode, one of them not trained; and a user that is a program."""

import verifiers.v1 as vf


class DuelTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        trace.info["turn_rewards"] = [float(len(message.content)) for message in trace.assistant_messages]
        return float(len(trace.last_reply))


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        return [DuelTask(vf.TaskData(prompt=f"duel{i}"), self.config.task) for i in range(4)]


class DuelConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    num_attempts: int = 1


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.num_attempts):
            async with agents.solver.interaction(task) as talk:
                said = await talk.turn()
                await talk.turn(f"again {said.last_reply}")
        await agents.judge.run(task)


__all__ = ["DuelEnv", "DuelTaskset"]
