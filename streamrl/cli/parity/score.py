"""`streamrl parity score`: the learner's log-probabilities of sampled tokens, as a report."""

import argparse
from pathlib import Path

import msgspec
import torch

from learners.parity import score
from learners.policy.policy import Policy
from learners.trainer import Trainer
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import ParitySamples


def main(arguments: argparse.Namespace) -> int:
    config: RunConfig = arguments.run_config
    if config.learner.num_threads:
        torch.set_num_threads(config.learner.num_threads)
    trainer = Trainer(config, Policy.from_config(config))
    reports = [
        score(trainer, _read(Path(file)), config.learner.dtype) for file in arguments.samples
    ]
    file = Path(arguments.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode({"unit": "nats", "reports": reports})
    file.write_bytes(msgspec.json.format(content) + b"\n")
    return 0


def _read(file: Path) -> ParitySamples:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    return wire.decode(data, ParitySamples, max_bytes=len(data))
