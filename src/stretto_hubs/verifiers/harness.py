"""A harness that runs in the worker process: it does what `null` does with a fortieth of the CPU time."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime

from stretto.envs.base import Message


class InProcessConfig(vf.HarnessConfig):
    pass


class InProcess(vf.Harness[InProcessConfig]):
    """Sends requests and calls tools, until a reply calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        timeout, headers = aiohttp.ClientTimeout(total=None), {"Authorization": f"Bearer {secret}"}
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, headers=headers))
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return ProgramResult(exit_code=1, stdout="", stderr=await response.text())
                    message = (await response.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    content = await _call_tool(call["function"], dispatch, connections)
                    answer = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append(bound_tool_message({**answer, "name": call["function"]["name"]}))


async def _call_tool(function: dict[str, str], dispatch: dict, connections: dict) -> Any:
    """The content of the tool message that answers a call; if the call is wrong, the error."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    return await call_mcp(connections, dispatch, function["name"], arguments)
