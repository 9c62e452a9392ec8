"""Tools of a real MCP server in another process, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_port

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from fakes import FakeEngine
from turns import CallRenderer, OneTask, called, scripted, text_of

from stretto.base.errors import ConfigError, EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import Reply
from stretto.envs.mcp import McpServer, McpToolEnv
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus

pytestmark = pytest.mark.heavy

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))
STDIO = McpServer(command=(sys.executable, SCRIPT, "stdio"))


class Letters(OneTask, McpToolEnv):
    servers = (STDIO,)

    def prompt(self, task):
        return [{"role": "user", "content": "abc"}]

    def score(self, episode):
        return float(episode.last_text == "cba")


async def results(env, *calls):
    message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    reply = Reply(message=message, text="", token_ids=np.array([1]), finish_reason="stop")
    return [m["content"] for m in await env.toolset().answer(reply)]


async def plays(env, *lines, members=1, **settings):
    engine = FakeEngine(scripted(*lines))
    player = Player(engine, CallRenderer(), SamplingSection(), seq_len=2000, **settings)
    return (await player.play(env, Draw(0, env.tasks("train").task(0), members, version=0))).rollouts


async def test_a_server_on_stdin_and_stdout_offers_its_tools():
    env = Letters()
    for rollout in await plays(env, '!reverse{"text": "abc"}', "cba", members=3):
        assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.FINISHED, 1.0, 2)
        assert text_of(rollout.branches[0], False) == "Uabc.ATcba.A"
    schemas = {schema["function"]["name"]: schema["function"] for schema in env.tool_schemas()}
    assert set(schemas) == {"reverse", "fail", "die"}
    assert schemas["reverse"]["description"] == "Reverses a text."
    assert schemas["reverse"]["parameters"]["properties"]["text"]["type"] == "string"
    answers = await results(env, called("fail", {}), called("reverse", {"txt": 1}), called("gone", {}))
    assert answers[0].startswith("Error: ") and "not today" in answers[0]
    assert answers[1].startswith("Error: ") and "text" in answers[1]
    assert answers[2].startswith("Error: no tool 'gone'")
    await env.close()


async def test_a_server_that_dies_fails_the_episode_and_is_started_again():
    env = Letters()
    (rollout,) = await plays(env, "!die{}", "cba", max_retries=0)
    assert rollout.status is RolloutStatus.FAILED and "MCP server" in rollout.error
    (rollout,) = await plays(env, '!reverse{"text": "abc"}', "cba", max_retries=0)
    assert rollout.reward == 1.0
    await env.close()


async def test_a_server_at_a_url_offers_its_tools():
    port = free_port()
    process = subprocess.Popen([sys.executable, SCRIPT, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        env = Letters()
        env.servers = (McpServer(url=f"http://127.0.0.1:{port}/mcp", only=("reverse",)),)
        async with asyncio.timeout(60):
            while True:
                try:
                    await env.connect()
                    break
                except EnvError:
                    await asyncio.sleep(0.1)
        assert [s["function"]["name"] for s in env.tool_schemas()] == ["reverse"]
        (rollout,) = await plays(env, '!reverse{"text": "abc"}', "cba")
        assert rollout.reward == 1.0
        await env.close()
    finally:
        process.kill()
        process.wait()


async def test_errors_name_servers_that_cannot_be_used():
    env = Letters()
    env.servers = (McpServer(command=("/nowhere/server",)),)
    with pytest.raises(EnvError, match="MCP server /nowhere/server: FileNotFoundError"):
        await env.connect()
    env.servers = (McpServer(command=STDIO.command, only=("revers",)),)
    with pytest.raises(ConfigError, match=r"no tool 'revers'.*reverse, fail, die"):
        await env.connect()
    for wrong in ({}, {"command": ("x",), "url": "http://x"}):
        with pytest.raises(ConfigError, match="give one of the two"):
            McpServer(**wrong)
