"""Tools that the policy calls; this file defines what a tool is to an episode.

    functions.py       a function or a class of the user's own, at PATH.py:NAME
    builtin.py         arithmetic, and code in the sandbox
    mcp.py             the tools of an MCP server
    toolset.py         all tools of a generator, the calls of an episode, the environment `tools`

A new kind of tool is a `ToolSource` and a line in `toolset.py`.

Invariant: whatever the outcome of a call (a result, an error, no answer, an unknown name), the
policy reads it as a message, and the episode's metrics count it. An episode fails only if its tools
cannot be reached.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from streamrl.config.generator import CallLimits
from streamrl.errors import StreamRLError
from streamrl.interfaces import ToolSchema


class ToolError(StreamRLError):
    """A call that has no result; the policy reads the message."""


class ToolSession(Protocol):
    """The tools of one source in one episode."""

    @property
    def schemas(self) -> tuple[ToolSchema, ...]: ...

    @property
    def has_state(self) -> bool:
        """Whether a call may depend on earlier ones."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call one of its tools; return the result. Several calls may run at a time.

        Raises:
            ToolError: there is no result.
            RolloutError: the tool is out of reach.
        """

    async def close(self) -> None:
        """Called once, at the end of the episode."""


class ToolSource(Protocol):
    """Opens sessions. It lives as long as its generator; what it runs ends with the generator."""

    limits: CallLimits

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The schemas of its tools, as far as known before a session is opened."""

    async def open(self) -> ToolSession:
        """
        Raises:
            RolloutError: its tools cannot be reached.
        """


def name_of(schema: ToolSchema) -> str:
    return str(schema["function"]["name"])
