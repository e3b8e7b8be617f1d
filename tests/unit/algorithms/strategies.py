"""Random batches and configurations for the property tests of the algorithms."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

from streamrl.algorithms.sequences import Sequences
from tests.settings import RolloutISConfig

for_any = settings(max_examples=25)
"""A case may take long the first time: torch loads kernels on first use."""


@dataclass
class Batch:
    train: Tensor
    behavior: Tensor
    sequences: Sequences

    def part(self, rows: slice) -> tuple["Batch", slice]:
        ends = self.sequences.lengths.cumsum(0).tolist()
        start = ends[rows.start - 1] if rows.start else 0
        tokens = slice(start, ends[rows.stop - 1] if rows.stop else 0)
        return Batch(self.train[tokens], self.behavior[tokens], self.sequences[rows]), tokens

    def reordered(self, order: Iterable[int]) -> "Batch":
        parts = [self.part(slice(row, row + 1))[0] for row in order]
        return Batch(
            torch.cat([part.train for part in parts] or [self.train]),
            torch.cat([part.behavior for part in parts] or [self.behavior]),
            Sequences.from_lengths([part.sequences.num_tokens for part in parts]),
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """float32 log-probabilities with log-ratios up to +-25, empty sequences included."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=6))
    count = sum(lengths)
    ratios = st.one_of(st.just(0.0), st.floats(-1, 1, width=32), st.sampled_from([-25.0, 25.0]))
    behavior = draw(st.lists(st.floats(-5, 0, width=32), min_size=count, max_size=count))
    difference = draw(st.lists(ratios, min_size=count, max_size=count))
    policy = torch.tensor(behavior, dtype=torch.float32)
    train = policy + torch.tensor(difference, dtype=torch.float32)
    return Batch(train, policy, Sequences.from_lengths(lengths))


@st.composite
def configs(draw: st.DrawFn) -> RolloutISConfig:
    rules = st.sampled_from([(), ({"token_k1": 2.0}, {"seq_mean_k3": 0.5})])
    return RolloutISConfig(
        threshold=draw(st.floats(1.1, 10.0)),
        threshold_lower=draw(st.one_of(st.none(), st.floats(0.01, 0.9))),
        level=draw(st.sampled_from(["token", "sequence", "geometric"])),
        mode=draw(st.sampled_from(["truncate", "clip"])),
        veto_threshold=draw(st.sampled_from([1e-4, 1e-2])),
        rejection=draw(rules),
    )
