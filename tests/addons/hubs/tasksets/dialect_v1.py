"""A taskset whose harness is the program of examples/agent, in the dialect that the taskset names."""

import asyncio
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

PROGRAM = str(Path(__file__).parents[4] / "examples/agent/program.py")


class DialectTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "4042")


class DialectTaskset(vf.Taskset[DialectTask, vf.TasksetConfig]):
    def load(self):
        return [DialectTask(vf.TaskData(prompt="47*86="), self.config.task)]


class ProgramConfig(vf.HarnessConfig):
    words: tuple[str, ...] = ("chat",)


class ProgramHarness(vf.Harness[ProgramConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        addresses = {"OPENAI_BASE_URL": endpoint, "ANTHROPIC_BASE_URL": endpoint.removesuffix("/v1")}
        env = os.environ | addresses | {"OPENAI_API_KEY": secret, "ANTHROPIC_API_KEY": secret}
        argv = [sys.executable, PROGRAM, prompt, *self.config.words]
        child = await asyncio.create_subprocess_exec(*argv, env=env, stderr=asyncio.subprocess.PIPE)
        _, error = await child.communicate()
        return ProgramResult(exit_code=child.returncode, stdout="", stderr=error.decode())


__all__ = ["DialectTaskset", "ProgramHarness"]
