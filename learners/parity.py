"""`streamrl parity score`: what the learner makes of tokens that an engine sampled.

The policy computes log-probabilities as a training step does: the same packing, attention,
precision and temperature. Called by `streamrl parity`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from learners.batch import TrainingBatch
from learners.policy import Policy
from learners.trainer import Trainer
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import ConfigError
from streamrl.types import GapStatistics, ParityReport, ParitySamples


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.learner.num_threads:
        torch.set_num_threads(config.learner.num_threads)
    trainer = Trainer(config, Policy.from_config(config))
    reports = [score(config, trainer, _read(Path(file))) for file in arguments.samples]
    file = Path(arguments.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode({"unit": "nats", "reports": reports})
    file.write_bytes(msgspec.json.format(content) + b"\n")
    return 0


def score(config: RunConfig, trainer: Trainer, samples: ParitySamples) -> ParityReport:
    """The learner's log-probabilities against the engine's, over all and by position."""
    batch = TrainingBatch.of(samples.groups, policy_version=0)
    gaps = (trainer.logprobs(batch) - batch.behavior_logprobs).double().numpy()
    lengths = batch.sequences.lengths.tolist()
    positions = np.concatenate([np.arange(length) for length in lengths])
    return ParityReport(
        engine=samples.engine,
        engine_dtype=samples.dtype,
        learner_dtype=config.learner.dtype,
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


def _read(file: Path) -> ParitySamples:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    return wire.decode(data, ParitySamples, max_bytes=len(data))
