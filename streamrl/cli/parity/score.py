"""The learner's half of `streamrl parity`: computes its log-probabilities of given tokens.

Samples of `parity --sample` become a report. With `--model` any sequences may be given: a line of
the input is `{"token_ids": [...], "response_mask": [...]}`, and the same line of the output
`{"logprobs": [...]}`, in nats at temperature 1, one for each token where the mask is true. They
come from the learner's own forward pass, so they can be compared with another implementation.

Invariant: the output is written whole, after the last sequence, or not at all.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from learners.batch.training_batch import TrainingBatch
from learners.parity import score
from learners.policy.policy import Policy
from learners.trainer import Trainer
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, did_you_mean, read_text, reading
from streamrl.types import FinishReason, ParitySamples, Trajectory, TrajectoryGroup
from streamrl.types.ranges import TokenId


class _Line(msgspec.Struct, frozen=True):
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    response_mask: list[bool | Literal[0, 1]]

    def __post_init__(self) -> None:
        if len(self.response_mask) != len(self.token_ids):
            raise ValueError(
                f"response_mask has {len(self.response_mask)} entries; must be a list as long as "
                f"token_ids, {len(self.token_ids)}"
            )
        if self.response_mask[0]:
            raise ValueError(
                "response_mask[0] is true; must be false, since no token before the first predicts "
                "it"
            )


_FIELDS = _Line.__struct_fields__


def score_samples(config: RunConfig, files: Sequence[str], report: Path) -> None:
    if config.learner.num_threads:
        torch.set_num_threads(config.learner.num_threads)
    trainer = Trainer(config, Policy.from_config(config))
    reports = []
    for file in files:
        with reading(Path(file)):
            data = Path(file).read_bytes()
        samples = wire.decode(data, ParitySamples, max_bytes=len(data))
        reports.append(score(trainer, samples, config.learner.dtype))
    report.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode({"unit": "nats", "reports": reports})
    report.write_bytes(msgspec.json.format(content) + b"\n")


def score_sequences(arguments: argparse.Namespace) -> None:
    """Write the log-probabilities of the sequences in one file, by the model of `--model`.

    Raises:
        ConfigError: a file cannot be read or written, a line is invalid, or the model's numbers are
            not finite.
    """
    source, target = Path(arguments.score[0]), Path(arguments.out)
    if not target.absolute().parent.is_dir() or target.is_dir():
        raise ConfigError(f"--out {target}: must be a file in a folder that exists")
    max_tokens = arguments.max_tokens_per_micro_batch
    sequences = list(_read(source, max_tokens))
    # The learner's settings are a run's defaults, except for what the command line says.
    settings: dict[str, Any] = {
        "model": {"path": arguments.model},
        "data": {"source": "addition"},
        "generator": {"temperature": 1.0},
        "learner": {"dtype": arguments.dtype},
    }
    policy = Policy.from_config(RunConfig.model_validate(settings))
    embeddings: Any = policy.model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    for number, sequence in enumerate(sequences, 1):
        outside = np.flatnonzero(sequence.token_ids >= size)
        if len(outside):
            raise ConfigError(
                f"{source}:{number}: token_ids[{outside[0]}] is {sequence.token_ids[outside[0]]}; "
                f"the model has {size} tokens"
            )
    logprobs = _score(sequences, policy, max_tokens) if sequences else []
    for number, values in enumerate(logprobs, 1):
        if not all(map(math.isfinite, values)):
            raise ConfigError(f"{source}:{number}: the model's log-probabilities are not finite")
    write_file(target, "".join(json.dumps({"logprobs": values}) + "\n" for values in logprobs))
    how = "packed" if policy.network.is_packed else "unpacked"
    print(f"scored {len(sequences)} sequences, {how}, in {arguments.dtype}: {target}")


def _score(sequences: list[Trajectory], policy: Policy, max_tokens: int) -> list[list[float]]:
    group = TrajectoryGroup(
        group_id="score", prompt_index=0, environment="score", trajectories=tuple(sequences)
    )
    batch = TrainingBatch.of([group], policy_version=0)
    micro_batches = policy.network.cut(batch, max_tokens)
    logprobs = policy.batch_logprobs(micro_batches, batch.sequences.num_tokens)
    parts = logprobs.split(batch.sequences.lengths.tolist())
    return [part.tolist() for part in parts]


def _read(file: Path, max_tokens: int) -> Iterator[Trajectory]:
    """Yield the sequences of the file, one per line.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid.
    """
    lines = read_text(file, "--score").removesuffix("\n").split("\n")
    for number, line in enumerate([] if lines == [""] else lines, 1):
        where = f"{file}:{number}"
        try:
            for name in msgspec.json.decode(line, type=dict[str, msgspec.Raw]):
                if name not in _FIELDS:
                    raise ConfigError(f"{where}: {name} is unknown; {did_you_mean(name, _FIELDS)}")
            given = msgspec.json.decode(line, type=_Line)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}; a line has {' and '.join(_FIELDS)}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: is not JSON: {error}") from error
        if len(given.token_ids) > max_tokens:
            raise ConfigError(
                f"{where}: token_ids has {len(given.token_ids)} tokens; "
                f"--max-tokens-per-micro-batch is {max_tokens}"
            )
        mask = np.array(given.response_mask, dtype=bool)
        yield Trajectory(
            token_ids=np.array(given.token_ids, dtype=np.int32),
            response_mask=mask,
            behavior_logprobs=np.zeros(len(mask), np.float32),
            policy_versions=np.where(mask, 0, -1).astype(np.int32),
            reward=0.0,
            finish_reason=FinishReason.STOP,
        )
