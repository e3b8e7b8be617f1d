"""Environments: what answers the policy's completions.

A built-in one is imported where it is used, so that a package which is not installed is missed only
there. In a name with a colon (`gymnasium:ID`) the rest is its first argument. A user's own is a
class in a file, PATH.py:CLASS. Each episode gets a new one, made with the entry's arguments.

Invariant: a user's environment that fails costs its group (RolloutError), never the daemon.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from actors.tools.toolset import TOOLS, Toolset
from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError, RolloutError, did_you_mean
from streamrl.extras import missing
from streamrl.interfaces import (
    Environment,
    EnvironmentContext,
    Observation,
    Transition,
)
from streamrl.types import Completion
from streamrl.user_code import attributed_to, check_kwargs, is_user_code, load_user_code

if TYPE_CHECKING:
    from actors.gateway.agent import Agent
    from actors.rendering.renderer import ChatRenderer

Make = Callable[..., "Environment | Agent"]


class SingleTurn:
    """One question, one answer."""

    async def start(self, context: EnvironmentContext) -> Observation:
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        return Transition(done=True)

    async def close(self) -> None:
        """There is nothing to close."""


BUILT_IN: Mapping[str, str] = {
    "single_turn": "actors.environments:SingleTurn",
    "agent": "actors.gateway.agent:UnservedAgent",
    TOOLS: "actors.tools.toolset:ToolEnvironment",
    "frozen_lake": "actors.environments.gymnasium:frozen_lake",
}
"""MODULE:NAME of what makes one."""
BY_ID: Mapping[str, str] = {
    "gymnasium": "actors.environments.gymnasium:gymnasium_text",
    "textarena": "actors.environments.textarena:textarena_game",
}
_INSTEAD: Mapping[str, str] = {
    **{
        name: f"`streamrl new FOLDER --recipe {name}` writes a run like it"
        for name in ("calculator", "file_search")
    },
    "sokoban": "textarena:Sokoban-v0 is the same game",
}
"""What replaces environments of earlier releases."""


def make_environment(entry: EnvironmentEntry) -> "Environment | Agent":
    """A new environment of the entry, without tools; raises as `environment_maker` does."""
    return environment_maker(entry, Toolset())()


def environment_maker(entry: EnvironmentEntry, toolset: Toolset) -> Make:
    """A function that makes a new environment of the entry at each call; the entry is checked here,
    once.

    Args:
        toolset: the generator's, shared by the episodes of environment `tools`.

    Raises:
        ConfigError: the name or an argument is unknown, or a package is not installed; from the
            returned function, if a value is not allowed or a user's own cannot be loaded.
    """
    if is_user_code(entry.environment):
        return partial(UserEnvironment, entry)
    kind, colon, own_id = entry.environment.partition(":")
    make = _built_in(entry, kind, own_id if colon else None)
    make = partial(make, own_id) if colon else make
    make = partial(make, toolset) if kind == TOOLS else make
    check_kwargs(entry.kwargs_setting, entry.environment, make, entry.kwargs)
    return partial(_made, entry, make)


def require_rendering(entries: Sequence[EnvironmentEntry], renderer: "ChatRenderer") -> None:
    """
    Raises:
        ConfigError: the chat template loses what an environment tells the policy, or the policy's
            tool calls cannot be read.
    """
    if any(entry.environment != "single_turn" for entry in entries):
        renderer.require_replies()
    if any(entry.environment == TOOLS for entry in entries):
        renderer.require_tools()
    if any(entry.environment == "agent" for entry in entries):
        renderer.encode_messages([{"role": "user", "content": "?"}])


def _built_in(entry: EnvironmentEntry, kind: str, own_id: str | None) -> Make:
    if instead := _INSTEAD.get(entry.environment):
        raise ConfigError(
            f"{entry.setting}: was {kind!r}, which is not built in any more; {instead}"
        )
    loads = BUILT_IN if own_id is None else BY_ID
    if kind not in loads or own_id == "":
        known = (*BUILT_IN, *(f"{name}:ID" for name in BY_ID))
        raise ConfigError(
            f"{entry.setting}: was {entry.environment!r}; PATH.py:NAME or "
            f"{did_you_mean(entry.environment, known)}"
        )
    try:
        if kind == "agent" and find_spec("aiohttp") is None:
            # The gateway's agent, which is imported once it serves.
            raise ImportError("aiohttp", name="aiohttp")
        make: Make = resolve_name(loads[kind])
        return make
    except ImportError as error:
        raise missing(f"{entry.setting}: {entry.environment}", error) from error


def _made(entry: EnvironmentEntry, make: Make) -> "Environment | Agent":
    try:
        return make(**entry.kwargs)
    except ValueError as error:
        raise ConfigError(f"{entry.kwargs_setting}: {entry.environment}: {error}") from error


class UserEnvironment:
    """A user's environment, whose errors become errors of its rollout.

    Raises:
        ConfigError: it cannot be created with the entry's arguments, or lacks a method.
    """

    def __init__(self, entry: EnvironmentEntry) -> None:
        self._name = entry.environment
        make = load_user_code(entry.setting, self._name)
        check_kwargs(entry.kwargs_setting, entry.environment, make, entry.kwargs)
        owner = f"{entry.setting}: {self._name}"
        with attributed_to(owner):
            self._environment: Environment = make(**entry.kwargs)
        for method in ("start", "step"):
            _check_method(owner, self._environment, method, object())
        if getattr(self._environment, "close", None):
            _check_method(owner, self._environment, "close")
        if any(getattr(self._environment, name, None) for name in ("snapshot", "restore")):
            _check_method(owner, self._environment, "snapshot")
            _check_method(owner, self._environment, "restore", object(), object())

    async def start(self, context: EnvironmentContext) -> Observation:
        observation: Observation = await self._call("start", context)
        return observation

    async def step(self, completion: Completion) -> Transition:
        transition: Transition = await self._call("step", completion)
        return transition

    async def snapshot(self) -> Any:
        """None if the user's environment makes no snapshots."""
        if getattr(self._environment, "snapshot", None):
            return await self._call("snapshot")
        return None

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        await self._call("restore", context, snapshot)

    async def close(self) -> None:
        if getattr(self._environment, "close", None):
            await self._call("close")

    async def _call(self, name: str, *arguments: object) -> Any:
        with attributed_to(f"environment {self._name}", RolloutError):
            return await getattr(self._environment, name)(*arguments)


def _check_method(owner: str, environment: object, name: str, *arguments: object) -> None:
    """Whether `await environment.name(*arguments)` can work."""
    method = getattr(environment, name, None)
    if not callable(method):
        raise ConfigError(
            f"{owner}: has no method {name!r}; start(context) and step(completion), and snapshot() "
            "with restore(context, snapshot) or neither"
        )
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{owner}: {name} takes {inspect.signature(method)}, but is called with "
            f"{len(arguments) or 'no'} argument: {error}"
        ) from error
    if inspect.ismethod(method) and not inspect.iscoroutinefunction(inspect.unwrap(method)):
        raise ConfigError(f"{owner}: {name} is not `async def`, and it is awaited")
