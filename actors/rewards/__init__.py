"""Rewards: built-in functions and a user's own Python file.

A built-in is a function `(episode, **kwargs) -> float` and a line in `BUILT_IN`. A user's own has
the same form and is named as PATH.py:FUNCTION:

    # rewards.py
    def score(episode):
        return float(episode.response.strip() == episode.prompt.answer)

With a first parameter named `episodes` it gets the whole group and returns a list.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from actors.rewards.builtin import environment, exact_match, numeric_answer, regex, task
from actors.rewards.functions import FunctionReward
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Reward
from streamrl.user_code import is_user_code, load_user_code

BUILT_IN: Mapping[str, Callable[..., float]] = {
    "environment": environment,
    "exact_match": exact_match,
    "numeric_answer": numeric_answer,
    "regex": regex,
    "task": task,
}


def make_reward(data: DataSettings) -> Reward:
    """The reward that `data.reward` names, with `data.reward_kwargs`."""
    if is_user_code(data.reward):
        own = load_user_code("data.reward", data.reward)
        _check_call(data.reward, own, data.reward_kwargs)
        return FunctionReward(own, data.reward_kwargs, name=data.reward)
    if data.reward not in BUILT_IN:
        raise ConfigError(
            f"data.reward: was {data.reward!r}; PATH.py:FUNCTION or "
            f"{did_you_mean(data.reward, BUILT_IN)}"
        )
    function = BUILT_IN[data.reward]
    _check_kwargs(data.reward, function, data.reward_kwargs)
    if data.reward == "regex":
        _check_pattern(data.reward_kwargs["pattern"])
    return FunctionReward(function, data.reward_kwargs, name=data.reward)


def _check_call(name: str, own: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Whether a user's own can be called with an episode and these arguments."""
    try:
        inspect.signature(own).bind(object(), **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"data.reward: {name} takes {inspect.signature(own)}, but is called with an episode "
            f"(or a group's episodes) and data.reward_kwargs {dict(kwargs)}: {error}"
        ) from error


def _check_pattern(pattern: object) -> None:
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise ConfigError(
            f"data.reward_kwargs: pattern {pattern!r} is no regular expression: {error}"
        ) from error


def _check_kwargs(name: str, function: Callable[..., float], kwargs: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    allowed = [parameter.name for parameter in parameters]
    for key in kwargs:
        if key not in allowed:
            raise ConfigError(
                f"data.reward_kwargs: {name} takes no {key!r}; {did_you_mean(key, allowed)}"
            )
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in kwargs:
            raise ConfigError(f"data.reward_kwargs: {name} needs {parameter.name!r}")
