"""The importance weights of each trajectory, as the loss has used them, for the samples of a step.

Invariant: what is kept is three numbers a trajectory, on the device until they are asked for.
"""

from collections.abc import Mapping

import torch

from learners.micro_batch import MicroBatch
from streamrl.samples import ImportanceWeights


class SeenWeights:
    """Of the first part of a batch, of the last update that each trajectory was in."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._is_first = True
        self._rows: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def begin(self, *, is_first: bool) -> None:
        """A part of a batch begins."""
        self._is_first = is_first
        self._rows = () if is_first else self._rows

    def add(self, micro_batch: MicroBatch, weights: torch.Tensor | None) -> None:
        """[R] of its response tokens; None where there is no correction."""
        if weights is None or not self._is_on or not self._is_first or micro_batch.is_empty:
            return
        weights, sequences = weights.detach(), micro_batch.sequences
        of_each = (sequences.mean(weights), -sequences.max(-weights), sequences.max(weights))
        self._rows = (*self._rows, (micro_batch.members, torch.stack(of_each, dim=1)))

    def take(self) -> Mapping[int, ImportanceWeights]:
        """By the trajectory's number in the part; waits for the device."""
        rows, self._rows = self._rows, ()
        return {
            member: ImportanceWeights(*numbers)
            for members, of_each in rows
            for member, numbers in zip(members.tolist(), of_each.tolist(), strict=True)
        }
