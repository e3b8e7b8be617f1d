"""The prompts of an environment that makes up its own task: nothing but the seed of a level.

Invariant: a level of training is a pure function of (seed, prompt index), a held-out one of its
index alone, and no seed is both.
"""

import numpy as np

from streamrl.interfaces import Prompt

_FIRST_HELD_OUT = 2**31
"""Seeds of training are below it."""


class LevelPrompts:
    """Empty prompts whose rows have a seed; `run_seed` None: the held-out ones."""

    def __init__(self, run_seed: int | None) -> None:
        self._run_seed = run_seed

    def __getitem__(self, prompt_index: int) -> Prompt:
        return Prompt("", "", {"seed": self._seed(prompt_index)}, f"level {prompt_index}")

    def _seed(self, prompt_index: int) -> int:
        if self._run_seed is None:
            return _FIRST_HELD_OUT + prompt_index
        entropy = np.random.SeedSequence([self._run_seed, prompt_index])
        return int(entropy.generate_state(1)[0]) % _FIRST_HELD_OUT
