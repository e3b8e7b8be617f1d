"""Whether an environment takes the arguments that its entry gives it."""

import inspect
from collections.abc import Callable
from typing import Any

from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError, did_you_mean


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
