"""The importance weights of each trajectory, as the loss has used them, for the samples of a step.

Invariant: what is kept is a number a response token, on the device until they are asked for.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from learners.micro_batch import MicroBatch


class SeenWeights:
    """Of the first part of a batch, of the last update that each trajectory was in."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._is_first = True
        self._rows: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] = ()

    def begin(self, *, is_first: bool) -> None:
        """A part of a batch begins."""
        self._is_first = is_first
        self._rows = () if is_first else self._rows

    def add(self, micro_batch: MicroBatch, weights: torch.Tensor | None) -> None:
        """[R] of its response tokens; None where there is no correction."""
        if weights is None or not self._is_on or not self._is_first or micro_batch.is_empty:
            return
        lengths = micro_batch.sequences.lengths
        self._rows = (
            *self._rows,
            (micro_batch.members, lengths, weights.detach().float().clone()),
        )

    def take(self) -> Mapping[int, NDArray[np.float32]]:
        """[response tokens] by the trajectory's number in the part; waits for the device."""
        rows, self._rows = self._rows, ()
        return {
            member: own
            for members, lengths, weights in rows
            for member, own in zip(
                members.tolist(),
                np.split(weights.cpu().numpy(), np.cumsum(lengths.tolist())[:-1]),
                strict=True,
            )
        }
