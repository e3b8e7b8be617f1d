"""A user's own environment, named as PATH.py:CLASS.

Invariant: one that fails costs its group (RolloutError, counted as `failed`), never the daemon.
An entry's arguments that the class does not take are refused.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError, RolloutError, did_you_mean
from streamrl.interfaces import (
    Environment,
    EnvironmentContext,
    Observation,
    RestorableEnvironment,
    Transition,
)
from streamrl.types import Completion
from streamrl.user_code import attributed_to, load_user_code


def check_arguments(entry: EnvironmentEntry, make: Callable[..., Any]) -> None:
    """
    Raises:
        ConfigError: an argument is unknown, or one that has no default is missing.
    """
    parameters = inspect.signature(make).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    allowed = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in entry.kwargs:
        if key not in allowed and not takes_any:
            hint = did_you_mean(key, allowed) if allowed else "it takes none"
            raise ConfigError(
                f"{entry.kwargs_setting}: {entry.environment} takes no {key!r}; {hint}"
            )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in entry.kwargs:
            raise ConfigError(
                f"{entry.kwargs_setting}: {entry.environment} needs {parameter.name!r}"
            )


class UserEnvironment:
    """A user's own, whose errors become those of its rollout.

    Raises:
        ConfigError: it cannot be made with the entry's arguments, or lacks a method.
    """

    def __init__(self, entry: EnvironmentEntry) -> None:
        self._name = entry.environment
        make = load_user_code(entry.setting, self._name)
        check_arguments(entry, make)
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
        with attributed_to(f"environment {self._name}", RolloutError):
            return await self._environment.start(context)

    async def step(self, completion: Completion) -> Transition:
        with attributed_to(f"environment {self._name}", RolloutError):
            return await self._environment.step(completion)

    async def snapshot(self) -> Any:
        """Of the user's own; None if it makes none."""
        if take := getattr(self._environment, "snapshot", None):
            with attributed_to(f"environment {self._name}", RolloutError):
                return await take()
        return None

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        """Calls the user's own."""
        with attributed_to(f"environment {self._name}", RolloutError):
            await cast(RestorableEnvironment, self._environment).restore(context, snapshot)

    async def close(self) -> None:
        """Calls the user's own `close`, which it need not have."""
        if close := getattr(self._environment, "close", None):
            with attributed_to(f"environment {self._name}", RolloutError):
                await close()


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
