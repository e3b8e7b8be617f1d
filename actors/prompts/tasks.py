"""Procedural tasks: endless prompts with exact answers, for laptops and tests.

Invariant: a prompt is a pure function of (seed, prompt index), one that is held out of its index
alone, and it never appears in training. A new task is a function and a line in `TASKS`.

`LevelPrompts`: the prompts of an environment that makes up its own task are nothing but the seed of
a level. A level of training is a pure function of (seed, prompt index), a held-out one of its index
alone, and no seed is both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.prompts.seeds import seed_of
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt
from streamrl.user_code import attributed_to, check_kwargs

Task = Callable[..., tuple[str, str]]
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
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
}


class HeldOutTaskPrompts:
    """The held-out prompts of one task.

    Raises:
        ConfigError: the task does not take the arguments.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        self._draw = _bound(name, kwargs)

    def __getitem__(self, number: int) -> Prompt:
        return Prompt(*self._draw([0, _HELD_OUT + number, 0]))


class TaskPrompts:
    """The training stream of one task, without the first `num_held_out` of each of `held_out`.

    Raises:
        ConfigError: the task does not take the arguments.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        seed: int,
        held_out: Sequence[HeldOutTaskPrompts],
        num_held_out: int,
    ) -> None:
        self._draw = _bound(name, kwargs)
        self._kwargs, self._seed = dict(kwargs), seed
        numbers = range(num_held_out)
        self._kept_out = frozenset(own[i].content for own in held_out for i in numbers)

    def __getitem__(self, prompt_index: int) -> Prompt:
        for attempt in range(_MAX_DRAWS):
            content, answer = self._draw([self._seed, prompt_index, attempt])
            if content not in self._kept_out:
                return Prompt(content, answer)
        raise ConfigError(
            f"data.num_eval_prompts: {len(self._kept_out)} prompts held out leave hardly any to "
            f"train on: data.source_kwargs {self._kwargs} make too few different ones"
        )


def _bound(name: str, kwargs: Mapping[str, Any]) -> Callable[[Sequence[int]], tuple[str, str]]:
    """Draws a prompt of the task and its answer from a seed of several parts."""
    task, own = TASKS[name], dict(kwargs)
    check_kwargs("data.source_kwargs", name, task, own, num_given=1)

    def draw(seed: Sequence[int]) -> tuple[str, str]:
        return task(np.random.default_rng(seed), **own)

    with attributed_to(f"data.source_kwargs: {name} with {own}"):
        draw([0])
    return draw


def _digits(rng: np.random.Generator, shortest: int, longest: int, tail: float) -> str:
    """A digit string of uniform length, or, with `tail` > 0, of log-normal length of that sigma."""
    if tail > 0:
        length = int(np.clip(shortest * rng.lognormal(0.0, tail), shortest, longest))
    else:
        length = int(rng.integers(shortest, longest + 1))
    return "".join(str(digit) for digit in rng.integers(0, 10, length))


class LevelPrompts:
    """Empty prompts whose rows have a seed; `run_seed` None: the held-out ones."""

    def __init__(self, run_seed: int | None) -> None:
        self._run_seed = run_seed

    def __getitem__(self, prompt_index: int) -> Prompt:
        seed = seed_of(self._run_seed, prompt_index)
        return Prompt("", "", {"seed": seed}, f"level {prompt_index}")
