"""Samples of what each step trained on, for people to read: `samples.jsonl` and tables.

Invariant: neither a step nor a checkpoint waits for it. A separate thread decodes and writes texts;
if it falls behind, or the disk is full, a step has no samples.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, to_builtins
from numpy.typing import NDArray

from streamrl.config import RunConfig
from streamrl.samples.files import SampleFile
from streamrl.samples.record import Decoder, Sample, open_decoder, sample_of
from streamrl.types import Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

MOST_WAITING = 4
LogTable: TypeAlias = Callable[[Sequence[Mapping[str, Any]], int], None]


class StepSamples(Struct, frozen=True):
    """Groups trained by the step after `policy_version`; importance `weights` [response tokens] by
    (group, trajectory)."""

    policy_version: int
    groups: Sequence[TrajectoryGroup]
    weights: Mapping[tuple[int, int], NDArray[np.float32]]


class SampleWriter:
    """Writes the samples of one learner that continues from a version; `log_table` shows them
    elsewhere."""

    def __init__(self, config: RunConfig, policy_version: int, log_table: LogTable) -> None:
        self._settings = config.tracking.samples
        self._model = config.model
        self._path = config.run.path
        self._first_step = policy_version + 1
        self._log_table = log_table
        self._file: SampleFile | None = None
        self._decoder: Decoder | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._waiting: tuple[Future[None], ...] = ()

    def add(self, step: StepSamples) -> None:
        """Hand samples over. Called in the compute thread; does not wait."""
        self._waiting = tuple(future for future in self._waiting if not future.done())
        if self._settings.num_groups and len(self._waiting) < MOST_WAITING:
            self._waiting = (*self._waiting, self._thread.submit(self._write, step))

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown()

    def _write(self, step: StepSamples) -> None:
        """A failure costs the samples of the step."""
        number = step.policy_version + 1
        try:
            if self._decoder is None or self._file is None:
                self._decoder = open_decoder(self._model)
                num_bytes = self._settings.max_bytes
                self._file = SampleFile(self._path, self._first_step, num_bytes)
            samples = self._samples(step, self._decoder)
            self._file.append(samples)
        except Exception as error:
            # The tokenizer may be the model's own code, and nobody reads the future's error.
            log.warning("step %d has no samples: %s: %s", number, type(error).__name__, error)
            return
        if number % self._settings.table_every == 0:
            self._log_table([to_builtins(sample) for sample in samples], number)

    def _samples(self, step: StepSamples, decoder: Decoder) -> list[Sample]:
        """Samples of groups that the step number selects at random."""
        num_groups = min(self._settings.num_groups, len(step.groups))
        numbers = random.Random(step.policy_version).sample(range(len(step.groups)), num_groups)
        return [
            sample_of(
                trajectory,
                decoder,
                step.weights.get((i, j)),
                step=step.policy_version + 1,
                prompt_index=step.groups[i].prompt_index,
                sibling=(step.groups[i].episode_indices or range(j + 1))[j],
                environment=step.groups[i].environment,
                staleness=_staleness(trajectory, step.policy_version),
                answer=step.groups[i].answer,
            )
            for i in sorted(numbers)
            for j, trajectory in enumerate(step.groups[i].trajectories)
            if trajectory.oldest_version is not None
        ]


def _staleness(trajectory: Trajectory, policy_version: int) -> int:
    """Versions between the furthest sampled token, older or newer, and the training step."""
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    assert oldest is not None, "one without a sampled token is no sample"
    assert newest is not None, "one without a sampled token is no sample"
    return max(policy_version - oldest, newest - policy_version)
