"""The task of peers/steps.py, as PATH.py:NAME: prompts whose responses have lengths of their own.

Lengths are log-normal and a pure function of the prompt and of the place among its siblings, so two
systems sample and train the same numbers of tokens, whatever the tokens are. Rewards are a function
of the length. Our engine is made to keep to them by `keep_lengths`, TRL's by a logits processor.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.interfaces import Episode, Prompt
from streamrl.types import replace

ALPHABET = "0123456789"
PROMPT_TOKENS = 6
SIGMA = 1.0


class Numbers:
    """The prompt stream: each prompt is its index, in six digits."""

    def __init__(self, seed: int, median: int, longest: int) -> None:
        keep_lengths(median, longest)

    def __getitem__(self, prompt_index: int) -> Prompt:
        return Prompt(f"{prompt_index:06d}", "", {"prompt_index": prompt_index})


def response_length(prompt: Sequence[int], sibling: int, median: int, longest: int) -> int:
    """Of this sibling's response; a prompt is known by its last tokens.

    >>> response_length([1, 2, 3, 4, 5, 6], 0, 40, 256)
    33
    """
    rng = np.random.default_rng([sibling, *(int(token) for token in prompt[-PROMPT_TOKENS:])])
    drawn = rng.lognormal(math.log(median), SIGMA)
    return int(np.clip(drawn, 4, longest))


def reward_of(length: int) -> float:
    """Anything that siblings differ in."""
    return (length % 8) / 8


def rewards(episodes: Sequence[Episode]) -> list[float]:
    return [reward_of(episode.num_response_tokens) for episode in episodes]


def keep_lengths(median: int, longest: int) -> None:
    """Let the engine of this process end every completion at its length, and not before."""
    from actors.engines.hf.engine import HfEngine

    calls: Counter[tuple[int, ...]] = Counter()
    generate = HfEngine.generate

    async def kept(self: HfEngine, prompt: Sequence[int], sampling: Any, handle: Any = None) -> Any:
        sibling = calls[tuple(prompt)]
        calls[tuple(prompt)] += 1
        length = response_length(prompt, sibling, median, longest)
        sampling = replace(sampling, max_new_tokens=length, ignore_eos=True)
        return await generate(self, prompt, sampling, handle)

    HfEngine.generate = kept  # type: ignore[method-assign]
