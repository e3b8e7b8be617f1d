"""Generated prompts and their seeds: procedural tasks with exact answers, for laptops and tests;
data sets of the reasoning-gym package (extra: tasks); levels of environments.

Invariant: a training prompt is a pure function of (seed, prompt index), a held-out prompt of its
index alone, and no held-out prompt is trained, whatever `run.seed` is. A new task is a function and
a line in `TASKS`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from streamrl.errors import ConfigError, did_you_mean
from streamrl.extras import missing
from streamrl.interfaces import Prompt
from streamrl.user_code import attributed_to, check_kwargs

# Seeds of training prompts are below this, and seeds of held-out prompts are not. Both fit into 32
# bits, which every package accepts.
FIRST_HELD_OUT = 2**31
HELD_OUT_RUN_SEED = 2**31 - 1
"""The seed that a user's own source gets for held-out prompts."""

Task = Callable[..., tuple[str, str]]
_MAX_DRAWS = 1000


def addition(rng: np.random.Generator, *, num_digits: int = 2) -> tuple[str, str]:
    """Two numbers of fixed width and their sum, one digit wider."""
    a, b = (int(x) for x in rng.integers(0, 10**num_digits, 2))
    return f"{a:0{num_digits}}+{b:0{num_digits}}=", f"{a + b:0{num_digits + 1}}"


def of_digits(letter: str, answer: Callable[[str], str]) -> Task:
    """A digit string of uniform length, or, with `tail` > 0, of log-normal length of that sigma."""

    def task(
        rng: np.random.Generator, *, min_length: int = 3, max_length: int = 8, tail: float = 0.0
    ) -> tuple[str, str]:
        if tail > 0:
            drawn = min_length * rng.lognormal(0.0, tail)
            length = int(np.clip(drawn, min_length, max_length))
        else:
            length = int(rng.integers(min_length, max_length + 1))
        digits = "".join(str(digit) for digit in rng.integers(0, 10, length))
        return f"{letter}{digits}=", answer(digits)

    return task


TASKS: dict[str, Task] = {
    "addition": addition,
    "copy": of_digits("c", str),
    "reverse": of_digits("r", lambda digits: digits[::-1]),
    "sort": of_digits("s", lambda digits: "".join(sorted(digits))),
}


class MadePrompts:
    """An endless stream of prompts that `make` makes from prompt indices."""

    def __init__(self, make: Callable[[int], Prompt]) -> None:
        self._make = make

    def __getitem__(self, prompt_index: int) -> Prompt:
        return self._make(prompt_index)


def held_out_task(name: str, kwargs: Mapping[str, Any]) -> MadePrompts:
    """The held-out prompts of a task. Raises ConfigError if the task does not take the
    arguments."""
    draw = _bound(name, kwargs)
    return MadePrompts(lambda number: Prompt(*draw([0, FIRST_HELD_OUT + number, 0])))


def trained_task(
    name: str,
    kwargs: Mapping[str, Any],
    seed: int,
    held_out: Sequence[MadePrompts],
    num_held_out: int,
) -> MadePrompts:
    """The training prompts of a task, without the first `num_held_out` of each of `held_out`.

    Raises:
        ConfigError: the task does not take the arguments.
    """
    draw = _bound(name, kwargs)
    kept_out = frozenset(own[i].content for own in held_out for i in range(num_held_out))

    def make(prompt_index: int) -> Prompt:
        for attempt in range(_MAX_DRAWS):
            content, answer = draw([seed, prompt_index, attempt])
            if content not in kept_out:
                return Prompt(content, answer)
        raise ConfigError(
            f"data.num_eval_prompts: {len(kept_out)} prompts held out leave hardly any to train "
            f"on: data.source_kwargs {dict(kwargs)} make too few different ones"
        )

    return MadePrompts(make)


def _bound(name: str, kwargs: Mapping[str, Any]) -> Callable[[Sequence[int]], tuple[str, str]]:
    """Return a function that draws a prompt of the task and its answer from a seed of several
    parts.

    Raises:
        ConfigError: the task does not take the arguments.
    """
    task, own = TASKS[name], dict(kwargs)
    check_kwargs("data.source_kwargs", name, task, own, num_given=1)

    def draw(seed: Sequence[int]) -> tuple[str, str]:
        return task(np.random.default_rng(seed), **own)

    with attributed_to(f"data.source_kwargs: {name} with {own}"):
        draw([0])
    return draw


def levels(run_seed: int | None) -> MadePrompts:
    """Empty prompts whose rows have a seed; with `run_seed` None, held-out ones."""
    return MadePrompts(lambda i: Prompt("", "", {"seed": seed_of(run_seed, i)}, f"level {i}"))


_BLOCK = 4096
UNEARNED: Mapping[str, str] = {
    "coin_flip": "the first character of the right answer alone",
    "complex_arithmetic": "an answer that is no number",
    "game_of_life_halting": "any text",
}
"""Wrong answers that the scorers of these data sets score in full, as of reasoning-gym 0.1.25."""


def reasoning_gym_prompts(
    name: str, kwargs: Mapping[str, Any], run_seed: int | None
) -> MadePrompts:
    """The data set `name`; its rows carry the entry that the reward `task` scores against.

    Most data sets draw entry i from seed + i, so adjacent seeds share all entries but one.
    Therefore the stream consists of blocks, no two of which share such a sum.

    Args:
        run_seed: None: the held-out prompts.

    Raises:
        ConfigError: there is no such data set, or it does not take the arguments.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise missing(f"data.source: reasoning_gym:{name}", error) from error
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise ConfigError(f"data.source: reasoning_gym has no {name!r}; {hint}")

    @lru_cache(maxsize=2)
    def block(number: int) -> Any:
        seed = block_seed(run_seed, number, _BLOCK)
        with attributed_to(f"data.source_kwargs: {name}"):
            return reasoning_gym.create_dataset(name, seed=seed, size=_BLOCK, **kwargs)

    def make(prompt_index: int) -> Prompt:
        number, place = divmod(prompt_index, _BLOCK)
        dataset = block(number)
        entry = dataset[place]
        return Prompt(entry["question"], str(entry["answer"]), {"dataset": dataset, "entry": entry})

    block(0)
    return MadePrompts(make)


def check_scorer(name: str) -> None:
    """
    Raises:
        ConfigError: the scorer of this data set, the reward `task`, pays for wrong answers.
    """
    if name in UNEARNED:
        raise ConfigError(
            f"data.reward: was task, and the scorer of reasoning_gym:{name} pays in full for "
            f"{UNEARNED[name]}; set another data.source or a reward of your own"
        )


def seed_of(run_seed: int | None, number: int) -> int:
    """The seed of the prompt with this number; with `run_seed` None, of the held-out prompt."""
    if run_seed is None:
        return FIRST_HELD_OUT + number
    entropy = np.random.SeedSequence([run_seed, number])
    return int(entropy.generate_state(1)[0]) % FIRST_HELD_OUT


def block_seed(run_seed: int | None, number: int, size: int) -> int:
    """The first of `size` consecutive seeds that no other block of the run uses.

    Training walks over all blocks below `FIRST_HELD_OUT`; `run_seed` draws the first block and an
    odd step, which visits each of 2**k blocks once.

    Args:
        run_seed: None for held-out blocks.
        size: a power of two.
    """
    if run_seed is None:
        return FIRST_HELD_OUT + number * size
    place, half_step = map(int, np.random.SeedSequence(run_seed).generate_state(2))
    return (place + number * (2 * half_step + 1)) % (FIRST_HELD_OUT // size) * size
