"""A real MCP server as a process: `python mcp_server.py stdio`, or `http PORT`."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("letters", log_level="CRITICAL")


@server.tool()
def reverse(text: str) -> str:
    """Reverses a text."""
    return text[::-1]


@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("not today")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
