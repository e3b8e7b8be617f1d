"""Verifiable tasks of the reasoning-gym package (extra: tasks), each with its own scorer.

Most data sets draw entry i from their seed + i, so that seeds side by side share all entries but
one. Invariant: the stream is made of blocks, no two of a run share such a sum, and none of training
is held out, whatever the seed of the run is. Entry i of a block is a pure function of its seed and
i.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from actors.prompts.seeds import block_seed
from streamrl.errors import ConfigError, did_you_mean
from streamrl.extras import missing
from streamrl.interfaces import Prompt
from streamrl.user_code import attributed_to

_BLOCK = 4096
UNEARNED: Mapping[str, str] = {
    "coin_flip": "the first character of the right answer alone",
    "complex_arithmetic": "an answer that is no number",
    "game_of_life_halting": "any text",
}
"""For what the scorers of these data sets pay in full, as of reasoning-gym 0.1.25."""


class ReasoningGymPrompts:
    """The data set `name`; its rows carry the entry that the reward `task` scores against.

    Args:
        run_seed: None: the held-out prompts.

    Raises:
        ConfigError: there is no such data set, or it does not take the arguments.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any], run_seed: int | None) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise missing(f"data.source: reasoning_gym:{name}", error) from error
        if name not in DATASETS:
            hint = did_you_mean(name, DATASETS)
            raise ConfigError(f"data.source: reasoning_gym has no {name!r}; {hint}")

        def block(number: int) -> Any:
            seed = block_seed(run_seed, number, _BLOCK)
            with attributed_to(f"data.source_kwargs: {name}"):
                return reasoning_gym.create_dataset(name, seed=seed, size=_BLOCK, **kwargs)

        self._block = lru_cache(maxsize=2)(block)
        self._block(0)

    def __getitem__(self, prompt_index: int) -> Prompt:
        number, place = divmod(prompt_index, _BLOCK)
        dataset = self._block(number)
        entry = dataset[place]
        return Prompt(entry["question"], str(entry["answer"]), {"dataset": dataset, "entry": entry})


def check_scorer(name: str) -> None:
    """Whether the reward `task` can be had for this data set.

    Raises:
        ConfigError: its scorer pays for answers that are wrong.
    """
    if name in UNEARNED:
        raise ConfigError(
            f"data.reward: was task, and the scorer of reasoning_gym:{name} pays in full for "
            f"{UNEARNED[name]}; set another data.source or a reward of your own"
        )
