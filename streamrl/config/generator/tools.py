"""`generator.tools` and `generator.mcp_servers`: what the policy may call, under which limits."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl.config.numbers import Positive, Seconds
from streamrl.config.section import Section


class CallLimits(Section):
    """Limits of the calls of a tool, or of all tools of a server."""

    time_limit_s: Seconds = 30.0
    """A call that takes longer is answered with an error."""
    max_concurrent: Positive = 8
    """Calls that one generator runs at a time; others wait, which does not count as their time."""
    max_result_length: Positive = 4096
    """Longest result, in characters; a longer one is cut, and says so."""


class ToolSettings(CallLimits):
    """A tool that the policy may call; its name alone stands for it where nothing else is set."""

    tool: str
    """calculator, python (runs code in a sandbox), or PATH.py:NAME, a function or a class."""
    function_schema: dict[str, Any] | Path | None = None
    """OpenAI schema of the function, or a YAML or JSON file with one; unset: made from its
    signature and docstring."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, which is made anew for each episode, or limits of python and its
    isolation."""

    @model_validator(mode="before")
    @classmethod
    def _named_alone(cls, value: Any) -> Any:
        return {"tool": value} if isinstance(value, str) else value


class McpServerSettings(CallLimits):
    """An MCP server whose tools the policy may call: a command that speaks over stdio, or a URL."""

    command: tuple[str, ...] = ()
    """The program and its arguments; started by each generator."""
    url: str | None = None
    """Of a server that speaks streamable HTTP."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, beside PATH and HOME."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request to the URL."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy may call; none: all that the server has."""
    session: Literal["generator", "episode"] = "generator"
    """Whether all episodes of a generator share one session, or each has its own."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> "McpServerSettings":
        if bool(self.command) == bool(self.url):
            raise ValueError("command, url: an MCP server has one of the two")
        return self
