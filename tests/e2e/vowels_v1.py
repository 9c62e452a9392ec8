"""The environments `Vowels` and `Dialogue` of envs.py as a taskset of verifiers."""

import verifiers.v1 as vf


class VowelsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter in "aeiou" for letter in said) / max(len(said), 1)


class VowelsTaskset(vf.Taskset[VowelsTask, vf.TasksetConfig]):
    def load(self):
        return [VowelsTask(vf.TaskData(prompt=f"{i:x}"), self.config.task) for i in range(64)]


class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("and then")


__all__ = ["TalkEnv", "VowelsTaskset"]
