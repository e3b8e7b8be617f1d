"""Mini-batches: which trajectories of a batch each of its updates trains.

Invariant: a function of the batch, the `learner:` section, the seed and the policy version, so that
a run that resumes repeats it. Groups are whole; an epoch trains each of them once.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from learners.batch import TrainingBatch
from streamrl.config import RunConfig


def mini_batches(
    batch: TrainingBatch, config: RunConfig, resampled: Sequence[int] | None = None
) -> list[list[int]]:
    """The trajectories of each update, by their index in the batch, in the order of the updates.

    Args:
        resampled: the trajectories that take the place of the batch's, with repetitions.
    """
    indices = range(len(batch.lengths)) if resampled is None else resampled
    groups = batch.group_indices.tolist()
    chosen = [[i for i in indices if groups[i] in update] for update in _groups(batch, config)]
    return [members for members in chosen if members]


def _groups(batch: TrainingBatch, config: RunConfig) -> Iterator[frozenset[int]]:
    """Of each update."""
    num_groups, learner = int(batch.group_indices.max()) + 1, config.learner
    for epoch in range(learner.epochs):
        random = np.random.default_rng([config.run.seed, batch.policy_version, epoch])
        order = random.permutation(num_groups)
        for groups in np.array_split(order, learner.updates_per_batch):
            yield frozenset(groups.tolist())
