'''A user's own reward: a function in a file of theirs, named as PATH.py:FUNCTION.

    # rewards.py
    def score(episode):
        """One number for one response; `episodes` instead gets the whole group."""
        return float(episode.response.strip() == episode.prompt.answer)

The file is run once, under its own name, so it may import what stands beside it.
'''

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.rewards.functions import FunctionReward
from streamrl.errors import ConfigError, did_you_mean


def load_user_reward(entry: str, kwargs: Mapping[str, Any]) -> FunctionReward:
    """The reward at PATH.py:FUNCTION.

    Raises:
        ConfigError: no such file or function, or the file cannot be run.
    """
    file, _, name = entry.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ConfigError(f"data.reward: was {entry!r}; a user's reward is named PATH.py:FUNCTION")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"data.reward: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    # Whatever the user's file raises, the sentence must say whose file it was.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"data.reward: {path}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"data.reward: {path} has no function {name!r}; {did_you_mean(name, functions)}"
        )
    return FunctionReward(function, kwargs, name=entry)
