"""Sequences with a number that is not finite leave the batch, and the step is made of the others.

A mask is not enough: in the backward pass such a row reaches the weights that all rows share, since
0 * NaN is NaN. So the sequence is taken out of its micro-batch, and what was accumulated of the
batch is computed anew without it, by all ranks together. As long as all are finite, this costs a
comparison per number.

Invariant: a batch of which no sequence is finite stays as it is; its gradient is not finite, and
its update is skipped and counted.
Shapes: R response tokens and S sequences of a micro-batch or of a batch.
"""

import logging
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TypeVar

import torch

from learners.micro_batch import MicroBatch
from streamrl.algorithms.sequences import Sequences

log = logging.getLogger(__name__)

Rest = TypeVar("Rest")


def finite_sequences(sequences: Sequences, *columns: torch.Tensor | None) -> torch.Tensor:
    """[S] bool, whether every number of a sequence is finite in the columns [R] that there are."""
    nonfinite = [~column.detach().isfinite() for column in columns if column is not None]
    if not nonfinite:
        return torch.ones(len(sequences), dtype=torch.bool)
    return sequences.max(reduce(or_, nonfinite).float()) == 0


def without_nonfinite(
    work: Sequence[tuple[MicroBatch, Rest]], is_finite: Sequence[torch.Tensor]
) -> tuple[tuple[MicroBatch, Rest], ...]:
    """As many micro-batches without the sequences for which [S] is false; each is logged."""
    for (micro_batch, _), mask in zip(work, is_finite, strict=True):
        for i in (~mask).nonzero()[:, 0].tolist():
            log.warning(
                "prompt %d: the log-probabilities of a trajectory of %d tokens are not finite; the "
                "step is made without it",
                micro_batch.prompt_indices[i],
                micro_batch.packing.lengths[i],
            )
    return tuple(
        (micro_batch.select(mask), rest)
        for (micro_batch, rest), mask in zip(work, is_finite, strict=True)
    )


def num_sequences(work: Sequence[tuple[MicroBatch, Rest]]) -> int:
    return sum(len(micro_batch.members) for micro_batch, _ in work)
