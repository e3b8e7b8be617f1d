"""The tools of an MCP server, by the official `mcp` package.

    McpServer     the server of the settings: which tools it has, and one session or many
    McpConnection a session, in its own task; begun when it is needed, and again after it broke

Invariant: if a server dies, the calls that wait for it are answered with an error, since one of
them may have been the reason. The next call starts or contacts the server again; if that fails, the
episode fails.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, CallToolResult, Tool

from actors.tools import ToolError, ToolSession
from streamrl.config.generator import CallLimits, McpServerSettings
from streamrl.errors import RolloutError, did_you_mean
from streamrl.interfaces import ToolSchema
from streamrl.user_code import attributed_to

log = logging.getLogger(__name__)

# What servers by URL answer for a session that they do not know because they were restarted.
_UNKNOWN = (INVALID_REQUEST, -32001)
_LONGEST_START = 10
"""The time limit of a start, as a multiple of a call's limit."""


class McpServer:
    """The server of one entry of `generator.mcp_servers`."""

    def __init__(self, settings: McpServerSettings, setting: str) -> None:
        self.limits: CallLimits = settings
        self._settings = settings
        self._setting = setting
        self._shared = McpConnection(settings)
        self._schemas: tuple[ToolSchema, ...] | None = None

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return self._schemas or ()

    async def open(self) -> ToolSession:
        """Open a session. Waits for the server only while its tools are unknown.

        Raises:
            RolloutError: the server does not start, cannot be reached, or lacks a tool that the
                settings name.
        """
        is_shared = self._settings.session == "generator"
        connection = self._shared if is_shared else McpConnection(self._settings)
        if self._schemas is None:
            try:
                with attributed_to(f"{self._setting}: {connection.name}", RolloutError):
                    tools = await _list_tools(await connection.client())
            except BaseException:
                if not is_shared:
                    await connection.close()
                raise
            self._schemas = self._chosen(tools)
        return _McpSession(self._schemas, connection, is_shared)

    def _chosen(self, tools: list[Tool]) -> tuple[ToolSchema, ...]:
        known = {tool.name: _schema(tool) for tool in tools}
        for name in self._settings.tools:
            if name not in known:
                hint = did_you_mean(name, known)
                raise RolloutError(f"{self._setting}.tools: it has no tool {name!r}; {hint}")
        return tuple(known[name] for name in self._settings.tools or known)


class McpConnection:
    """One session with a server."""

    def __init__(self, settings: McpServerSettings) -> None:
        self._settings = settings
        self._beginning = asyncio.Lock()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[Client] | None = None

    @property
    def name(self) -> str:
        return self._settings.url or " ".join(self._settings.command)

    @property
    def time_limit_s(self) -> float:
        return self._settings.time_limit_s

    async def client(self) -> Client:
        """Return the session's client. Waits for the session to begin, if there is none. Raises
        whatever keeps it from beginning."""
        async with self._beginning:
            if self._begun is None or self._task is None or self._task.done():
                await self.close()
                self._begun = asyncio.get_running_loop().create_future()
                self._ending = asyncio.Event()
                self._task = asyncio.create_task(self._serve(self._begun, self._ending))
            # After a caller has given up waiting, the next one waits for the same start.
            either: set[asyncio.Future[Any]] = {self._begun, self._task}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._begun.done():
                raise _innermost(self._task)
            return self._begun.result()

    async def close(self) -> None:
        """End the session, and the server if it was started for it. Waits for the end."""
        if self._task is None:
            return
        self._ending.set()
        if self._begun is None or not self._begun.done():  # It is broken, or has not begun.
            self._task.cancel()
        self._begun = None
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()):
            log.info("the session with the MCP server %s ended with: %s", self.name, error)
        self._task = None

    def forget(self, client: Client) -> None:
        """Mark the session of this client as broken: the next call begins another one, unless
        another one has already begun."""
        if self._begun is not None and self._begun.done() and self._begun.result() is client:
            self._begun = None

    def is_broken(self, error: MCPError) -> bool:
        """Whether this error means that the session will answer no more calls. The code alone does
        not decide, since a tool may refuse arguments with the same codes."""
        is_unknown = error.code in _UNKNOWN and "session" in error.message.casefold()
        return error.code == CONNECTION_CLOSED or (self._settings.url is not None and is_unknown)

    async def _serve(self, begun: asyncio.Future[Client], ending: asyncio.Event) -> None:
        """Run the session from beginning to end in one task, as the package demands. Waits for
        `ending`."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(_LONGEST_START * self.time_limit_s):
                client = await stack.enter_async_context(await self._make_client(stack))
            begun.set_result(client)
            await ending.wait()

    async def _make_client(self, stack: AsyncExitStack) -> Client:
        settings = self._settings
        if settings.url is None:
            program, *arguments = settings.command
            parameters = {"args": arguments, "env": settings.environment}
            return Client(StdioServerParameters(command=program, **parameters))
        # Calls have their own, shorter limit; this one would end the session.
        longest_s = 2 * settings.time_limit_s
        client = httpx2.AsyncClient(headers=settings.headers, timeout=longest_s)
        http = await stack.enter_async_context(client)
        return Client(streamable_http_client(settings.url, http_client=http))


@dataclass(frozen=True)
class _McpSession:
    """The server's tools in one episode. They count as stateful, since the server's state is
    unknown."""

    schemas: tuple[ToolSchema, ...]
    connection: McpConnection
    is_shared: bool
    has_state = True

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        server = f"the MCP server of {name}"
        with attributed_to(server, RolloutError):
            # Just before the call's own limit, which would become an answer to the policy.
            limit_s = 0.95 * self.connection.time_limit_s
            try:
                async with asyncio.timeout(limit_s):
                    client = await self.connection.client()
            except TimeoutError as error:
                sentence = f"its session has not begun within {limit_s:g} s"
                raise TimeoutError(sentence) from error
        try:
            with attributed_to(server, ToolError):
                result = await client.call_tool(name, dict(arguments))
        except ToolError as error:
            cause = error.__cause__
            if not isinstance(cause, MCPError):
                self.connection.forget(client)
                raise
            if self.connection.is_broken(cause):
                self.connection.forget(client)
            raise ToolError(cause.message) from cause
        return _text(result)

    async def close(self) -> None:
        if not self.is_shared:
            await self.connection.close()


def _innermost(task: asyncio.Task[None]) -> BaseException:
    """Why the task ended, without the groups in which the package wraps it."""
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or ConnectionError("the session ended")


async def _list_tools(client: Client) -> list[Tool]:
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _schema(tool: Tool) -> ToolSchema:
    function = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _text(result: CallToolResult) -> str:
    """The texts of a result; other contents are named by type. Raises ToolError if the result is an
    error."""
    parts = [getattr(part, "text", f"({part.type})") for part in result.content]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolError(text)
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return text
