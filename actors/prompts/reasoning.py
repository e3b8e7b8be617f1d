"""Verifiable tasks of the reasoning-gym package (extra: tasks), each with its own scorer.

Invariant: entry i of a data set is a pure function of its seed and i, so the stream is made of
blocks with a seed each; held-out prompts come from a seed that no stream has.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Prompt

_BLOCK = 4096
_STREAM = 100_000


class ReasoningGymPrompts:
    """The data set `name`; its rows carry the entry that the reward `task` scores against."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], seed: int, *, held_out: bool) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                "data.source: reasoning_gym is not installed: pip install 'streamrl[tasks]'"
            ) from error
        if name not in DATASETS:
            raise ConfigError(
                f"data.source: reasoning_gym has no {name!r}; {_hint(name, DATASETS)}"
            )

        def block_seed(number: int) -> int:
            """No stream has so many blocks that it came to a held-out one."""
            return number * _STREAM + _STREAM - 1 if held_out else seed * _STREAM + number

        def block(number: int) -> Any:
            try:
                return reasoning_gym.create_dataset(
                    name, seed=block_seed(number), size=_BLOCK, **kwargs
                )
            except TypeError as error:
                raise ConfigError(f"data.source_kwargs: {name}: {error}") from error

        self._block = lru_cache(maxsize=2)(block)
        self._block(0)

    def __getitem__(self, prompt_index: int) -> Prompt:
        number, place = divmod(prompt_index, _BLOCK)
        dataset = self._block(number)
        entry = dataset[place]
        return Prompt(entry["question"], str(entry["answer"]), {"dataset": dataset, "entry": entry})


def _hint(name: str, datasets: Mapping[str, Any]) -> str:
    return did_you_mean(name, datasets)
