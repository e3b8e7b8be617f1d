"""Procedural tasks: endless prompts with exact answers, for laptops and tests.

Invariant: a prompt is a pure function of (seed, prompt index), one that is held out of its index
alone, and it never appears in training. A new task is a function and a line in `TASKS`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actors.prompts.colors import colors
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Message, Prompt
from streamrl.user_code import attributed_to

Content = str | tuple[Message, ...]
Task = Callable[..., tuple[Content, str]]
_HELD_OUT = 2**31
_MAX_DRAWS = 1000


def addition(rng: np.random.Generator, *, num_digits: int = 2) -> tuple[str, str]:
    """Two numbers of fixed width and their sum, one digit wider."""
    a, b = (int(x) for x in rng.integers(0, 10**num_digits, 2))
    return f"{a:0{num_digits}}+{b:0{num_digits}}=", f"{a + b:0{num_digits + 1}}"


def reverse(
    rng: np.random.Generator, *, min_length: int = 3, max_length: int = 8, tail: float = 0.0
) -> tuple[str, str]:
    """A digit string backwards."""
    digits = _digits(rng, min_length, max_length, tail)
    return f"r{digits}=", digits[::-1]


def copy(
    rng: np.random.Generator, *, min_length: int = 3, max_length: int = 8, tail: float = 0.0
) -> tuple[str, str]:
    """A digit string again."""
    digits = _digits(rng, min_length, max_length, tail)
    return f"c{digits}=", digits


def sort(
    rng: np.random.Generator, *, min_length: int = 3, max_length: int = 8, tail: float = 0.0
) -> tuple[str, str]:
    """The digits of a string in order."""
    digits = _digits(rng, min_length, max_length, tail)
    return f"s{digits}=", "".join(sorted(digits))


TASKS: dict[str, Task] = {
    "addition": addition,
    "colors": colors,
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
}


class TaskPrompts:
    """The stream of one task; with `held_out`, the prompts kept out of it."""

    def __init__(
        self, name: str, kwargs: Mapping[str, Any], seed: int, *, num_held_out: int, held_out: bool
    ) -> None:
        task = TASKS[name]
        allowed = [p for p in inspect.signature(task).parameters if p != "rng"]
        for key in kwargs:
            if key not in allowed:
                hint = did_you_mean(key, allowed)
                raise ConfigError(f"data.source_kwargs: {name} has no argument {key!r}; {hint}")
        self._task = task
        self._kwargs = dict(kwargs)
        self._seed = seed
        self._held_out = held_out
        with attributed_to(f"data.source_kwargs: {name} with {self._kwargs}"):
            self._draw(0, 0)
        numbers = () if held_out else range(num_held_out)
        self._kept_out = frozenset(_key(self._held_out_prompt(i)[0]) for i in numbers)

    def __getitem__(self, prompt_index: int) -> Prompt:
        if self._held_out:
            content, answer = self._held_out_prompt(prompt_index)
            return Prompt(content, answer)
        for attempt in range(_MAX_DRAWS):
            content, answer = self._draw(prompt_index, attempt)
            if _key(content) not in self._kept_out:
                return Prompt(content, answer)
        raise ConfigError(
            f"data.num_eval_prompts: {len(self._kept_out)} prompts held out leave hardly any to "
            f"train on: data.source_kwargs {self._kwargs} make too few different ones"
        )

    def _held_out_prompt(self, number: int) -> tuple[Content, str]:
        return self._task(np.random.default_rng([0, _HELD_OUT + number, 0]), **self._kwargs)

    def _draw(self, number: int, attempt: int) -> tuple[Content, str]:
        return self._task(np.random.default_rng([self._seed, number, attempt]), **self._kwargs)


def _key(content: Content) -> str:
    """Equal for equal contents; an image stands in it by the hash of its bytes."""
    return content if isinstance(content, str) else repr(content)


def _digits(rng: np.random.Generator, shortest: int, longest: int, tail: float) -> str:
    """A digit string of uniform length, or, with `tail` > 0, of log-normal length of that sigma."""
    if tail > 0:
        length = int(np.clip(shortest * rng.lognormal(0.0, tail), shortest, longest))
    else:
        length = int(rng.integers(shortest, longest + 1))
    return "".join(str(digit) for digit in rng.integers(0, 10, length))
