"""MCP servers: real ones, over stdio and HTTP, that fail and die."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from mcp import MCPError
from mcp_types import INVALID_REQUEST, CallToolResult, TextContent

from actors.tools import ToolError, name_of
from actors.tools.mcp import McpConnection, McpServer
from actors.tools.toolset import EpisodeTools, Toolset, make_sources
from streamrl.config import load_config
from streamrl.config.generator import GeneratorSettings, McpServerSettings
from streamrl.errors import ConfigError, RolloutError
from tests.ports import free_port
from tests.waiting import block_until

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = (sys.executable, str(SERVER), "stdio")
TIME_LIMIT_S = 120.0
T = TypeVar("T")


async def answer(tools: EpisodeTools, tool: str, /, **arguments: object) -> str:
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return str((await tools.answer(call))["content"])


def toolset(**settings: object) -> Toolset:
    server = {"time_limit_s": TIME_LIMIT_S, **settings}
    return Toolset(make_sources(GeneratorSettings(mcp_servers=(server,))))  # type: ignore[arg-type]


async def test_calls_errors_and_a_server_that_dies_over_stdio():
    shared = toolset(command=COMMAND)
    tools, others = await shared.open(), await shared.open()
    assert [name_of(s) for s in tools.schemas] == ["count", "fail", "die", "sleep", "pid"]
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["name"]
    assert [await answer(t, "count", name="a") for t in (tools, others)] == ["1", "2"]
    assert (await answer(tools, "fail", reason="x")).startswith("error: Error executing tool fail")
    assert "Field required" in await answer(tools, "count")
    first = psutil.Process(int(await answer(tools, "pid")))
    assert await answer(tools, "die") == "error: Connection closed"
    assert await answer(others, "count", name="a") == "1"
    assert not first.is_running()
    assert tools.metrics["tool/die/num_errors"] == 1
    await tools.close()
    assert await answer(others, "count", name="a") == "2"


def test_the_server_ends_with_its_generator():
    async def generator() -> int:
        return int(await answer(await toolset(command=COMMAND).open(), "pid"))

    assert not psutil.pid_exists(asyncio.run(generator()))


async def test_each_episode_has_its_session():
    servers = toolset(command=COMMAND, session="episode", tools=["count", "pid"])
    a, b = await servers.open(), await servers.open()
    assert [name_of(s) for s in a.schemas] == ["count", "pid"]
    assert [await answer(t, "count", name="a") for t in (a, b)] == ["1", "1"]
    process = psutil.Process(int(await answer(a, "pid")))
    await a.close()
    assert not process.is_running()
    await b.close()


async def test_a_tool_that_is_not_there_is_named():
    with pytest.raises(RolloutError, match=r"mcp_servers.0.tools: it has no tool 'cuont'.*count"):
        await toolset(command=COMMAND, tools=["cuont"]).open()


async def test_a_command_that_is_not_there():
    with pytest.raises(RolloutError, match=r"mcp_servers.0: no-such-server: FileNotFoundError"):
        await toolset(command=("no-such-server",)).open()


@pytest.fixture
def http() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    port = free_port()
    with subprocess.Popen([sys.executable, str(SERVER), "http", str(port)]) as server:
        block_until(
            lambda: is_open(port), TIME_LIMIT_S, explain=lambda: "the server does not listen"
        )
        yield f"http://127.0.0.1:{port}/mcp", server
        server.kill()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_server_by_its_url_that_dies(http: tuple[str, "subprocess.Popen[bytes]"]):
    url, server = http
    tools = await toolset(url=url).open()
    assert await answer(tools, "count", name="a") == "1"
    # Longer than a client of HTTP waits by itself.
    assert await answer(tools, "sleep", seconds=5.5) == "slept"
    server.kill()
    server.wait()
    assert (await answer(tools, "count", name="a")).startswith("error: ")
    with pytest.raises(RolloutError, match="the MCP server of count: ConnectError"):
        await answer(tools, "count", name="a")
    with pytest.raises(RolloutError, match="ConnectError"):
        await toolset(url=url).open()


class Server:
    """One session; `code` is that of its answer to calls, if it does not know the session."""

    def __init__(self, code: int = 0) -> None:
        self._code = code

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def call_tool(self, name: str, arguments: dict[str, object]) -> CallToolResult:
        if self._code:
            raise MCPError(self._code, "Session not found")
        return CallToolResult(content=[TextContent(text="7")])


async def test_calls_that_give_up_on_a_slow_start_do_not_begin_it_again():
    slow = ("sh", "-c", f"sleep 3; exec {sys.executable} {SERVER} stdio")
    shared = toolset(command=slow, time_limit_s=2)
    with pytest.raises(RolloutError, match="a tool was not opened within its time limit"):
        await shared.open()
    tools = await in_the_end(shared.open)
    assert await answer(tools, "die") == "error: Connection closed"
    with pytest.raises(RolloutError, match=r"its session has not begun within 1\.9 s"):
        await answer(tools, "count", name="a")
    assert await in_the_end(lambda: answer(tools, "count", name="a")) == "1"
    await tools.close()


async def in_the_end(attempt: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(TIME_LIMIT_S):
        while True:
            with contextlib.suppress(RolloutError):
                return await attempt()


async def test_a_server_that_says_nothing_as_its_session_begins_fails_the_group(
    http: tuple[str, "subprocess.Popen[bytes]"],
):
    url, server = http
    tools = await toolset(url=url, time_limit_s=4).open()
    assert await answer(tools, "count", name="a") == "1"
    server.kill()
    server.wait()
    assert (await answer(tools, "count", name="a")).startswith("error: ")
    host, _, port = url.removeprefix("http://").removesuffix("/mcp").partition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(RolloutError, match=r"its session has not begun within 3\.8 s"),
    ):
        await answer(tools, "count", name="a")
    await tools.close()


@pytest.mark.parametrize("code", [INVALID_REQUEST, -32001])
async def test_a_session_that_a_server_has_lost_is_begun_again(monkeypatch, code: int):
    sessions = [Server(code), Server()]

    async def make_client(self: McpConnection, stack: object) -> Server:
        return sessions.pop(0)

    monkeypatch.setattr(McpConnection, "_make_client", make_client)
    server = McpServer(McpServerSettings(url="http://host/mcp"), "generator.mcp_servers.0")
    server._schemas = ()
    session = await server.open()
    with pytest.raises(ToolError, match="Session not found"):
        await session.call("count", {})
    assert await session.call("count", {}) == "7"


def test_a_server_has_a_command_or_a_url():
    for given in ({}, {"command": ["a"], "url": "http://b"}):
        with pytest.raises(ValueError, match="an MCP server has one of the two"):
            McpServerSettings(**given)


def test_the_package_is_missed_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "actors.tools.mcp", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"mcp_servers: .* pip install 'streamrl\[mcp\]'"):
        toolset(command=COMMAND)


def test_settings_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {name: x}\nmodel: {path: m}\ndata: {source: addition}\n"
        "generator:\n  environment: tools\n  tools:\n    - calculator\n"
        "    - {tool: python, time_limit_s: 3}\n"
        "  mcp_servers:\n    - command: [a, b]\n      session: episode\n"
    )
    generator = load_config(path).config.generator
    assert [tool.tool for tool in generator.tools] == ["calculator", "python"]
    assert generator.tools[1].time_limit_s == 3
    assert generator.mcp_servers[0].command == ("a", "b")
