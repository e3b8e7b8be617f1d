"""Prompts that several trajectories of a micro-batch begin with: their tokens are computed once.

Where attention alone connects tokens, a token's states depend on the tokens up to it and on nothing
else, so trajectories that begin alike have the same ones there. What follows the last token that
predicts one is left out, too.

Invariant: log-probabilities and gradients are those of the micro-batch without sharing, up to the
order of sums. A trajectory that is not finite may make those that begin like it so, too.
Called by: `learners.batch`; the network decides whether it may share.
Shapes: N tokens of the micro-batch, n of them computed, S trajectories, R response tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from learners.policy.packed.stretches import Packing

MOST = 0.9
"""Share of the tokens from which on leaving out the others is not worth it."""


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """What is computed of a micro-batch in which trajectories begin alike."""

    tokens: torch.Tensor
    """[n] which of the N tokens."""
    predictors: torch.Tensor
    """[R] positions in n whose hidden states predict the response tokens."""
    packing: Packing
    """Of the trajectories without what follows their last predictor."""
    prompts: tuple[int, ...]
    """[S] tokens of each trajectory's beginning, which others may have, too."""

    @classmethod
    def of(
        cls,
        token_ids: NDArray[np.integer],
        lengths: Sequence[int],
        prompts: Sequence[int],
        predictors: NDArray[np.int64],
        device: torch.device,
        most: float = MOST,
    ) -> "SharedPrompts | None":
        """None if more than `most` of the tokens would be left.

        Args:
            token_ids: [N]
            lengths: [S] tokens of each trajectory.
            prompts: [S] tokens of its beginning, which others may have, too.
            predictors: [R] positions in N, rising.
        """
        sizes = np.array(lengths, np.int64)
        ends = sizes.cumsum()
        starts = ends - sizes
        # Of a trajectory without any, the one before its first token, if there is one.
        last = np.append(predictors, -1)[np.searchsorted(predictors, ends) - 1]
        needed = np.maximum(last + 1 - starts, 1)
        common = np.minimum(prompts, needed)
        bounds = zip(starts.tolist(), common.tolist(), strict=True)
        leaders = leaders_of(token_ids[start : start + length] for start, length in bounds)
        row = np.arange(len(needed)).repeat(needed)
        offset = np.arange(len(row)) - (needed.cumsum() - needed).repeat(needed)
        is_own = (leaders[row] == row) | (offset >= common[row])
        if is_own.sum() > most * len(row):
            return None
        # A row's own tokens have places one after the other; its prompt has those of its leader.
        own = is_own.cumsum() - 1
        first = own[needed.cumsum() - needed]
        places = np.where(is_own, own, first[leaders[row]] + offset)
        place_of = np.zeros(len(token_ids), np.int64)
        place_of[starts[row] + offset] = places
        return cls(
            tokens=torch.from_numpy((starts[row] + offset)[is_own]).to(device),
            predictors=torch.from_numpy(place_of[predictors]).to(device),
            packing=Packing(tuple(needed.tolist()), device, torch.from_numpy(places)),
            prompts=tuple(prompts),
        )


def leaders_of(prompts: Iterable[NDArray[np.integer]]) -> NDArray[np.int64]:
    """[S] the first trajectory with the same prompt, from the token ids of each one's."""
    found: dict[bytes, int] = {}
    leaders = [found.setdefault(ids.tobytes(), i) for i, ids in enumerate(prompts)]
    return np.array(leaders, np.int64)
