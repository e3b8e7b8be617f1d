"""The learner's half of parity: its log-probabilities, as a training step computes them, of tokens
that an engine sampled."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from learners.batch.training_batch import TrainingBatch
from learners.trainer import Trainer
from streamrl.types import GapStatistics, ParityReport, ParitySamples


def score(trainer: Trainer, samples: ParitySamples, dtype: str) -> ParityReport:
    """The learner's log-probabilities against the engine's, over all and by position;
    `dtype` is `learner.dtype`."""
    batch = TrainingBatch.of(samples.groups, policy_version=0)
    gaps = (trainer.logprobs(batch) - batch.behavior_logprobs).double().numpy()
    lengths = batch.sequences.lengths.tolist()
    positions = np.concatenate([np.arange(length) for length in lengths])
    return ParityReport(
        engine=samples.engine,
        engine_dtype=samples.dtype,
        learner_dtype=dtype,
        num_prompts=len(samples.groups),
        overall=statistics_of(gaps, 0, int(positions.max())),
        by_position=tuple(_by_position(gaps, positions)),
    )


def statistics_of(gaps: NDArray[np.float64], first: int, last: int) -> GapStatistics:
    """Of these gaps [n >= 1], which stand at positions `first` to `last`."""
    sizes, ratios = np.abs(gaps), np.exp(gaps)
    return GapStatistics(
        first=first,
        last=last,
        num_tokens=len(gaps),
        mean=float(sizes.mean()),
        p99=float(np.percentile(sizes, 99)),
        max=float(sizes.max()),
        ratio_error=float(np.abs(ratios - 1).mean()),
        k3_kl=float((ratios - 1 - gaps).mean()),
    )


def _by_position(
    gaps: NDArray[np.float64], positions: NDArray[np.int64]
) -> Iterator[GapStatistics]:
    """Positions 0, 1-2, 3-6, 7-14, ...: each stretch twice as long as the one before it."""
    bins = np.log2(positions + 1).astype(int)
    for number in range(int(bins.max()) + 1):
        here = bins == number
        yield statistics_of(gaps[here], 2**number - 1, int(positions[here].max()))
