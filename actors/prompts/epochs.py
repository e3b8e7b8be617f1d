"""A finite set of prompts as a stream without an end.

The order is a pure function of (seed, prompt index): each epoch is a permutation of its own, so no
prompt comes twice within an epoch and a resumed run goes on where it stopped. Where it goes on with
other rows, an epoch of them begins; a prompt before it that is still open reads them, too, in an
order of its own. With a curriculum the first epochs go by difficulty.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from actors.prompts.rows import PromptRows, column
from streamrl.config.data import CurriculumSettings
from streamrl.data_files import shown
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt


class Epochs:
    """The prompts of a set, or those of `kept`, in the order of each epoch.

    Args:
        seed: of the order, in one or several parts; None keeps that of the set.
        kept: the numbers of the prompts that are used, ascending; None uses all.
        first: with which index the first epoch begins.

    Raises:
        ConfigError: a row has no number in the column of the curriculum.
    """

    def __init__(
        self,
        prompts: PromptRows,
        seed: Sequence[int] | None,
        curriculum: CurriculumSettings | None = None,
        kept: NDArray[np.int64] | None = None,
        first: int = 0,
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._first = first
        self._kept = kept
        self._curriculum = curriculum
        self._sorted = None if curriculum is None else _by_difficulty(prompts, curriculum, kept)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._prompts) if self._kept is None else len(self._kept)

    def __getitem__(self, prompt_index: int) -> Prompt:
        epoch, place = divmod(prompt_index - self._first, len(self))
        order = self._order(epoch)
        number = place if order is None else int(order[place])
        return self._prompts[number if self._kept is None else int(self._kept[number])]

    def _permutation(self, epoch: int) -> NDArray[np.int64] | None:
        """Of this epoch; None for the set's own order."""
        numbers = np.random.default_rng([*(self._seed or (0,)), epoch % 2**32])
        settings = self._curriculum
        if settings is not None and self._sorted is not None and 0 <= epoch < settings.num_epochs:
            moved = numbers.random(len(self)) * settings.window * len(self)
            return self._sorted[np.argsort(np.arange(len(self)) + moved, kind="stable")]
        return None if self._seed is None else numbers.permutation(len(self))


def _by_difficulty(
    prompts: PromptRows, settings: CurriculumSettings, kept: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The places of the prompts that are used, sorted."""
    values = np.array([_difficulty(prompt, settings.column) for prompt in prompts])
    chosen = values if kept is None else values[kept]
    return np.argsort(chosen if settings.order == "ascending" else -chosen, kind="stable")


def _difficulty(prompt: Prompt, key: str) -> float:
    value = column(prompt, key)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not np.isfinite(number):
        raise ConfigError(
            f"data.curriculum.column: {prompt.origin or 'a prompt'} has {key} {shown(value)}; it "
            "must be a number"
        )
    return number
