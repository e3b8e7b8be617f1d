"""Environments: what answers the policy's completions.

A built-in environment is a class (see `streamrl.interfaces.Environment`) and a line in `BUILT_IN`;
a user's own is a class in a file, named as PATH.py:NAME. Either is made without arguments, once per
episode.

Invariant: a user's environment that fails costs its group (RolloutError, counted as `failed`),
never the daemon.
"""

import inspect
from collections.abc import Callable, Mapping

from actors.gateway.agent import Agent
from actors.gateway.start import AGENT, UnservedAgent
from streamrl.errors import ConfigError, RolloutError, did_you_mean
from streamrl.interfaces import Environment, EnvironmentContext, Observation, Transition
from streamrl.types import Completion
from streamrl.user_code import attributed_to, is_user_code, load_user_code


class SingleTurn:
    """One question, one answer."""

    async def start(self, context: EnvironmentContext) -> Observation:
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        return Transition(done=True)

    async def close(self) -> None:
        """There is nothing to close."""


class UserEnvironment:
    """A user's own, whose errors become those of its rollout.

    Raises:
        ConfigError: it cannot be made without arguments, or lacks a method.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        make = load_user_code("generator.environment", name)
        with attributed_to(f"generator.environment: {name}"):
            self._environment: Environment = make()
        for method in ("start", "step"):
            _check_method(f"generator.environment: {name}", self._environment, method)

    async def start(self, context: EnvironmentContext) -> Observation:
        with attributed_to(f"environment {self._name}", RolloutError):
            return await self._environment.start(context)

    async def step(self, completion: Completion) -> Transition:
        with attributed_to(f"environment {self._name}", RolloutError):
            return await self._environment.step(completion)

    async def close(self) -> None:
        """Calls the user's own `close`, which it need not have."""
        if close := getattr(self._environment, "close", None):
            with attributed_to(f"environment {self._name}", RolloutError):
                await close()


def _check_method(owner: str, environment: object, name: str) -> None:
    """Whether `await environment.name(argument)` can work."""
    method = getattr(environment, name, None)
    if not callable(method):
        raise ConfigError(f"{owner}: has no method {name!r}; start(context) and step(completion)")
    try:
        inspect.signature(method).bind(object())
    except TypeError as error:
        raise ConfigError(
            f"{owner}: {name} takes {inspect.signature(method)}, but is called with one argument: "
            f"{error}"
        ) from error
    if inspect.ismethod(method) and not inspect.iscoroutinefunction(inspect.unwrap(method)):
        raise ConfigError(f"{owner}: {name} is not `async def`, and it is awaited")


BUILT_IN: Mapping[str, Callable[[], Environment | Agent]] = {
    "single_turn": SingleTurn,
    AGENT: UnservedAgent,
}


def make_environment(name: str) -> Environment | Agent:
    """A fresh environment that `generator.environment` names.

    Raises:
        ConfigError: the name is unknown, or a user's own cannot be loaded.
    """
    if is_user_code(name):
        return UserEnvironment(name)
    if name not in BUILT_IN:
        raise ConfigError(
            f"generator.environment: was {name!r}; PATH.py:NAME or {did_you_mean(name, BUILT_IN)}"
        )
    return BUILT_IN[name]()
