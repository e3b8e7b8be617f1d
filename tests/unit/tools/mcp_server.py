"""A real MCP server: `python mcp_server.py stdio`, or `... http PORT`."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("counters")
counts: dict[str, int] = {}


@server.tool()
def count(name: str) -> int:
    """How often it was called with this name in this session's server."""
    counts[name] = counts.get(name, 0) + 1
    return counts[name]


@server.tool()
def fail(reason: str) -> str:
    """Always fails."""
    raise ValueError(reason)


@server.tool()
def die() -> str:
    """Ends the server's process."""
    os._exit(1)


@server.tool()
def sleep(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def pid() -> int:
    """The server's process."""
    return os.getpid()


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
