"""The unit that has one weight: what `algorithm.rollout_is.level` names."""

import torch
from torch import Tensor

from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RolloutISSettings


class Level:
    """The unit that has one weight: a token, or a sequence with as many votes as tokens."""

    def __init__(self, config: RolloutISSettings, sequences: Sequences) -> None:
        self.name = config.level
        self.by_token = config.level == "token"
        self.sequences = sequences
        self.counts = None if self.by_token else sequences.lengths.double()

    def aggregate(self, log_ratio: Tensor, log_ratio_sums: Tensor) -> Tensor:
        """Logarithm of the unit's weight."""
        match self.name:
            case "token":
                return log_ratio
            case "sequence":
                return log_ratio_sums
            case _:
                return log_ratio_sums / self.sequences.lengths

    def total(self, values: Tensor) -> Tensor:
        """Sum over tokens."""
        return values.sum() if self.counts is None else torch.dot(values.double(), self.counts)

    def to_tokens(self, values: Tensor) -> Tensor:
        return values if self.by_token else self.sequences.expand(values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self.sequences.mean(values) if self.by_token else values

    def of_sequence(self, per_sequence: Tensor) -> Tensor:
        return self.sequences.expand(per_sequence) if self.by_token else per_sequence
