"""The prompts of an environment that makes up its own task: nothing but the seed of a level.

Invariant: a level of training is a pure function of (seed, prompt index), a held-out one of its
index alone, and no seed is both.
"""

from actors.prompts.seeds import seed_of
from streamrl.interfaces import Prompt


class LevelPrompts:
    """Empty prompts whose rows have a seed; `run_seed` None: the held-out ones."""

    def __init__(self, run_seed: int | None) -> None:
        self._run_seed = run_seed

    def __getitem__(self, prompt_index: int) -> Prompt:
        seed = seed_of(self._run_seed, prompt_index)
        return Prompt("", "", {"seed": seed}, f"level {prompt_index}")
