"""All tools of a generator, the calls of one episode, and the environment `tools`.

    Toolset          the tools of `generator.tools` and `generator.mcp_servers`
    EpisodeTools     one episode's sessions; runs its calls, and counts them by tool
    ToolEnvironment  the policy calls tools until one of its turns makes no call

Invariant: after its wait for a slot, a call is answered within its time limit, by a result or a
message that begins with "error:"; if the tool cannot be reached, the episode fails.

A completion ends the episode if it calls nothing, was cut, or has a call that cannot be read; the
last counts as an invalid turn. The reward judges the last turn, or the conversation.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from actors.tools import ToolError, ToolSession, ToolSource, name_of
from actors.tools.builtin import calculator, python
from actors.tools.functions import UserTool
from streamrl.config.generator import CallLimits, GeneratorSettings, ToolSettings
from streamrl.errors import ConfigError, RolloutError, did_you_mean
from streamrl.extras import missing
from streamrl.interfaces import EnvironmentContext, Message, Observation, ToolSchema, Transition
from streamrl.types import Completion, FinishReason
from streamrl.user_code import is_user_code

log = logging.getLogger(__name__)
T = TypeVar("T")

TOOLS = "tools"
"""The name of the environment."""
# More calls in one completion are answered with an error and not run.
_MAX_CALLS = 32

BUILT_IN: Mapping[str, Callable[[ToolSettings, str], ToolSource]] = {
    "calculator": calculator,
    "python": python,
}


@dataclass
class ToolCounts:
    """Counts of one tool's calls in an episode."""

    num_calls: int = 0
    num_errors: int = 0
    time_s: float = 0.0

    def metrics(self, name: str) -> Mapping[str, float]:
        return {
            f"tool/{name}/num_calls": self.num_calls,
            f"tool/{name}/num_errors": self.num_errors,
            f"tool/{name}/time_s": self.time_s,
        }


class Toolset:
    """The tools of one generator."""

    def __init__(self, sources: Sequence[ToolSource] = ()) -> None:
        self._sources = [(s, asyncio.Semaphore(s.limits.max_concurrent)) for s in sources]

    async def open(self, names: Sequence[str] = ()) -> "EpisodeTools":
        """Open the tools of one episode. Waits for servers that must be started or contacted.

        Args:
            names: the tools that may be called; none: all.

        Raises:
            RolloutError: a tool cannot be reached or is unknown, or two tools have the same name.
        """
        opened: list[_Opened] = []
        try:
            for source, slots in self._sources:
                async with asyncio.timeout(source.limits.time_limit_s):
                    opened.append(_Opened(await source.open(), source.limits, slots))
            return EpisodeTools(opened, names)
        except (TimeoutError, RolloutError) as error:
            await _all(one.session.close() for one in opened)
            if isinstance(error, RolloutError):
                raise
            raise RolloutError("a tool was not opened within its time limit") from error


class _Opened(NamedTuple):
    """The tools of one source in one episode; all episodes share the slots for its calls."""

    session: ToolSession
    limits: CallLimits
    slots: asyncio.Semaphore


class EpisodeTools:
    """The tools of one episode.

    Raises:
        RolloutError: two tools have the same name, or a requested tool does not exist.
    """

    def __init__(self, opened: Sequence[_Opened], names: Sequence[str] = ()) -> None:
        self._opened = opened
        tools = [(schema, one) for one in opened for schema in one.session.schemas]
        known = [name_of(schema) for schema, _ in tools]
        if twice := [name for name in known if known.count(name) > 1]:
            raise RolloutError(f"generator.tools: two tools are called {twice[0]!r}")
        if missing := [name for name in names if name not in known]:
            hint = did_you_mean(missing[0], known)
            raise RolloutError(f"generator.tools: there is no tool {missing[0]!r}; {hint}")
        chosen = [(schema, one) for schema, one in tools if name_of(schema) in (names or known)]
        self.schemas: tuple[ToolSchema, ...] = tuple(schema for schema, _ in chosen)
        self._tools = {name_of(schema): one for schema, one in chosen}
        self._counts = {name: ToolCounts() for name in self._tools}
        self._num_unknown = 0

    async def answer(self, call: Mapping[str, Any]) -> Message:
        """Run a call that `Renderer.parse` returned; return its answer, a message with the role
        `tool`.

        Raises:
            RolloutError: the tool is out of reach.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in self._tools:
            self._num_unknown += 1
            content = f"error: there is no tool {name!r}; {did_you_mean(name, self._tools)}"
        else:
            content = await self._result(name, arguments)
        return {"role": "tool", "name": name, "content": content}

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number, errors and time of the calls so far, by tool."""
        known = {k: v for name, c in self._counts.items() for k, v in c.metrics(name).items()}
        return {**known, "tool/num_unknown": self._num_unknown}

    def snapshot(self) -> Mapping[str, Any] | None:
        """A snapshot of the counts so far; None if a session may have state."""
        if any(one.session.has_state for one in self._opened):
            return None
        counts = {name: astuple(count) for name, count in self._counts.items()}
        return {"counts": counts, "num_unknown": self._num_unknown}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        for name, count in snapshot["counts"].items():
            self._counts[name] = ToolCounts(*count)
        self._num_unknown = snapshot["num_unknown"]

    async def close(self) -> None:
        await _all(one.session.close() for one in self._opened)

    async def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a call. Waits for a slot, then for the result or the time limit."""
        session, limits, slots = self._tools[name]
        async with slots:
            begun = monotonic()
            try:
                async with asyncio.timeout(limits.time_limit_s):
                    content, is_error = await session.call(name, arguments), False
            except ToolError as error:
                log.debug("%s", error)
                content, is_error = f"error: {error}", True
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                # The tool itself raised it.
                content, is_error = f"error: {name}: CancelledError: {error}", True
            except TimeoutError:
                content, is_error = f"error: no answer within {limits.time_limit_s:g} s", True
            counts = self._counts[name]
            counts.num_calls += 1
            counts.num_errors += is_error
            counts.time_s += monotonic() - begun
        # A lone surrogate, which JSON allows, cannot be tokenized.
        return cut(content, limits.max_result_length).encode(errors="replace").decode()


def make_sources(generator: GeneratorSettings) -> tuple[ToolSource, ...]:
    """
    Raises:
        ConfigError: a tool is unknown or cannot be made.
    """
    tools = [_make(tool, f"generator.tools.{i}") for i, tool in enumerate(generator.tools)]
    if not generator.mcp_servers:
        return tuple(tools)
    try:
        from actors.tools.mcp import McpServer
    except ImportError as error:
        raise missing("generator.mcp_servers:", error) from error

    places = enumerate(generator.mcp_servers)
    return (*tools, *(McpServer(s, f"generator.mcp_servers.{i}") for i, s in places))


def _make(settings: ToolSettings, setting: str) -> ToolSource:
    if is_user_code(settings.tool):
        return UserTool(settings, setting)
    if settings.tool not in BUILT_IN:
        hint = did_you_mean(settings.tool, BUILT_IN)
        raise ConfigError(f"{setting}.tool: was {settings.tool!r}; PATH.py:NAME or {hint}")
    if settings.function_schema is not None:
        raise ConfigError(f"{setting}.function_schema: {settings.tool} has its own")
    return BUILT_IN[settings.tool](settings, setting)


def cut(text: str, longest: int) -> str:
    """The text, shortened if needed: its beginning, and how much of the whole that is."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}\n(cut: the first {longest} of {len(text)} characters)"


async def _all(awaited: Iterable[Awaitable[T]]) -> list[T]:
    """Wait until all have ended, then raise the first error, if any."""
    outcomes = await asyncio.gather(*awaited, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


class ToolEnvironment:
    """One episode with the tools of its generator."""

    def __init__(self, toolset: Toolset, tools: Sequence[str] = ()) -> None:
        """
        Args:
            tools: names of the tools that may be called; none: all.
        """
        self._toolset = toolset
        self._names = tuple(tools)
        self._tools: EpisodeTools | None = None
        self._context: EnvironmentContext | None = None

    async def start(self, context: EnvironmentContext) -> Observation:
        """Return the prompt's messages and the tools' schemas. Waits for the tools."""
        self._context = context
        self._tools = await self._toolset.open(self._names)
        messages = context.renderer.messages(context.prompt)
        return Observation(messages=messages, tools=self._tools.schemas)

    async def step(self, completion: Completion) -> Transition:
        """Answer the completion's calls. Waits for the slowest one."""
        assert self._tools is not None, "start comes first"
        assert self._context is not None, "start comes first"
        message = self._context.renderer.parse(completion.token_ids.tolist(), self._tools.schemas)
        calls = message.get("tool_calls", ())
        is_cut = completion.finish_reason is not FinishReason.STOP
        if is_cut or not calls:
            is_valid = is_cut or "parse_error" not in message
            return Transition(done=True, is_valid=is_valid, metrics=self._tools.metrics)
        answers = await _all(self._tools.answer(call) for call in calls[:_MAX_CALLS])
        refused = tuple(_refusal(call) for call in calls[_MAX_CALLS:])
        return Transition(
            Observation(messages=(*answers, *refused)),
            done=False,
            num_tool_calls=len(answers),
            metrics=self._tools.metrics,
        )

    async def snapshot(self) -> Any:
        """The state of the tools; None if a session may have state."""
        return None if self._tools is None else self._tools.snapshot()

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        """Open the tools again and restore their counts. Waits for the tools."""
        await self.start(context)
        assert self._tools is not None, "they were opened"
        self._tools.restore(snapshot)

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()


def _refusal(call: Mapping[str, Mapping[str, str]]) -> Message:
    content = f"error: not run, one turn may make {_MAX_CALLS} calls"
    return {"role": "tool", "name": call["function"]["name"], "content": content}
