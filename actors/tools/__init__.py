"""Tools: what the policy calls, and what answers it; here what a tool is to an episode.

    functions.py       a function or a class of the user's own, at PATH.py:NAME
    builtin.py         arithmetic, and code in the sandbox
    mcp.py             the tools of an MCP server
    toolset.py         all tools of a generator, the calls of an episode, the environment `tools`

A new kind of tool is a `ToolSource` and a line in `toolset.py`.

Invariant: whatever a call comes to (an error, no answer, an unknown name) is a message that the
policy reads, and a number in the episode's metrics; an episode fails only where its tools are out
of reach.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from streamrl.config.generator import CallLimits
from streamrl.errors import StreamRLError
from streamrl.interfaces import ToolSchema


class ToolError(StreamRLError):
    """A call that has no result; the policy reads the sentence."""


class ToolSession(Protocol):
    """The tools of one source, as one episode has them."""

    @property
    def schemas(self) -> tuple[ToolSchema, ...]: ...

    @property
    def has_state(self) -> bool:
        """Whether a call may depend on earlier ones."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of one of its tools; called by several at a time.

        Raises:
            ToolError: there is none.
            RolloutError: the tool is out of reach.
        """

    async def close(self) -> None:
        """Called once, with the episode's end."""


class ToolSource(Protocol):
    """Where sessions come from; lives as long as its generator, whose end ends what it runs."""

    limits: CallLimits

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Of its tools, as far as they are known before one is opened."""

    async def open(self) -> ToolSession:
        """
        Raises:
            RolloutError: its tools are out of reach.
        """


def name_of(schema: ToolSchema) -> str:
    return str(schema["function"]["name"])
