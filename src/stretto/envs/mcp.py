"""Tools of MCP servers: programs on stdin and stdout, or URLs of streamable HTTP.

`McpToolEnv` connects before its first episode and keeps the connections; the servers' tools are offered beside the
environment's own functions. Each connection has a task of its own, because a client must be closed in the task that
opened it; the connection ends with the event loop, and the program with it. If a server is lost, the episode fails
(and is played again) and the server is connected again; an error that a server answers is text for the policy.

Needs the extra `mcp`, which is imported when the first connection is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import RolloutContext, RolloutResult
from stretto.envs.multi_turn import Episode, ToolEnv
from stretto.envs.tools import Tool, Toolset
from stretto.records.rollout import Task


@dataclass(frozen=True)
class McpServer:
    """A server: `command` starts it, or it listens at `url`. Give one of the two."""

    command: Sequence[str] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command, added to a few of this process, such as PATH."""
    only: Sequence[str] = ()
    """Names of the tools to offer; empty for all."""
    timeout_s: float = 30.0
    """Time limit for the connection and the list of tools."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"McpServer(command={list(self.command)}, url={self.url!r}): give one of the two.")

    @property
    def where(self) -> str:
        return self.url or " ".join(self.command)


class Connection:
    """A connection to one server, held in its own task until `close` or the end of the event loop."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: list[RemoteTool] = []
        self._loop = asyncio.get_running_loop()
        self._is_ready: asyncio.Future[None] = self._loop.create_future()
        self._is_closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    @property
    def is_open(self) -> bool:
        is_this_loop = self._loop is asyncio.get_running_loop()
        return is_this_loop and not self._task.done() and not self._is_closing.is_set()

    async def ready(self) -> None:
        """Wait until the list of tools is there.

        Raises: ConfigError if `mcp` is not installed, EnvError if the server does not answer.
        """
        try:
            async with asyncio.timeout(self.server.timeout_s):
                await asyncio.shield(self._is_ready)
        except TimeoutError as cause:
            self._task.cancel()
            raise EnvError(f"MCP server {self.server.where}: no answer in {self.server.timeout_s:g} s") from cause

    def mark_lost(self) -> None:
        """Close without waiting, because the server is lost; the next episode connects again."""
        self._is_closing.set()

    async def close(self) -> None:
        self._is_closing.set()
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            client = _client_of(self.server)
            async with client:
                self.tools = await self._list_tools(client)
                self._is_ready.set_result(None)
                await self._is_closing.wait()
        # Clients raise errors of many kinds, in exception groups; all mean that the server cannot be used.
        except Exception as error:
            cause = _innermost(error)
            if not isinstance(cause, ConfigError):
                cause = EnvError(f"MCP server {self.server.where}: {type(cause).__name__}: {cause}")
            if not self._is_ready.done():
                self._is_ready.set_exception(cause)

    async def _list_tools(self, client: Any) -> list[RemoteTool]:
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [RemoteTool(self, client, tool) for tool in page.tools]
            if (cursor := page.next_cursor) is None:
                break
        names = [tool.name for tool in found]
        if missing := [name for name in self.server.only if name not in names]:
            raise ConfigError(f"MCP server {self.server.where} has no tool {missing[0]!r}; it has {', '.join(names)}.")
        return [tool for tool in found if not self.server.only or tool.name in self.server.only]


class RemoteTool(Tool):
    """A tool of an MCP server."""

    def __init__(self, connection: Connection, client: Any, tool: Any) -> None:
        self.name = tool.name
        self.schema = {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        self._connection, self._client = connection, client

    async def run(self, arguments: dict[str, Any], episode: Any = None) -> str:
        """Call the tool; returns the text of the result. The server checks the arguments.

        Raises: EnvError if the server is lost.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(self.name, arguments)
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                return f"Error: {error}"
            self._connection.mark_lost()
            raise EnvError(f"MCP server {self._connection.server.where} is lost: {error}") from error
        # All other errors of a client come from the connection.
        except Exception as error:
            self._connection.mark_lost()
            cause = _innermost(error)
            where = self._connection.server.where
            raise EnvError(f"MCP server {where}: {type(cause).__name__}: {cause}") from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return f"Error: {text}" if result.is_error else text


class McpToolEnv(ToolEnv):
    """A `ToolEnv` that also offers the tools of `servers`."""

    servers: Sequence[McpServer] = ()

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        await self.connect()
        return await super().rollout(task, ctx)

    async def connect(self) -> None:
        """Connect to all servers that are not connected; concurrent episodes share the connections."""
        connections: list[Connection] = getattr(self, "_connections", [])
        if connections and all(each.is_open for each in connections):
            await asyncio.gather(*(each.ready() for each in connections))
            return
        open_connections = {id(each.server): each for each in connections if each.is_open}
        self._connections = connections = [open_connections.get(id(s)) or Connection(s) for s in self.servers]
        await asyncio.gather(*(each.ready() for each in connections))
        remote = [tool for each in connections for tool in each.tools]
        self._toolset = Toolset([*self.tools, *remote], self.tool_timeout_s, Episode)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(each.close() for each in getattr(self, "_connections", []) if each.is_open))


def _client_of(server: McpServer) -> Any:
    try:
        import mcp
        from mcp.client.stdio import stdio_client
    except ModuleNotFoundError as cause:
        raise ConfigError("MCP servers need the extra `mcp`: pip install 'stretto[mcp]'.") from cause
    if server.url:
        return mcp.Client(server.url)
    program, *arguments = server.command
    parameters = mcp.StdioServerParameters(command=program, args=arguments, env=dict(server.env) or None)
    return mcp.Client(stdio_client(parameters))


def _innermost(error: Exception) -> Exception:
    """The first error inside nested exception groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
