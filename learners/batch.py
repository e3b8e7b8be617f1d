"""Trajectory groups as tensors: the batch of a step, and its micro-batches.

A `TrainingBatch` holds what was recorded, flat over response tokens; a `MicroBatch` is the part of
it that shares one forward pass, its tokens packed.
Invariant: a batch does not depend on how it is cut; a micro-batch says which rows of it it holds.
Shapes: S trajectories, R response tokens of all of them, N tokens (prompts included) of a
micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from learners.packing import pack
from learners.policy.attention import Packing
from streamrl.algorithms.sequences import Sequences
from streamrl.errors import ConfigError
from streamrl.types import GREEDY_REWARD, INVALID_TURNS, Trajectory, TrajectoryGroup


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """One optimizer step's trajectories, in order of their groups."""

    trajectories: tuple[Trajectory, ...]
    group_indices: torch.Tensor
    """[S] int64, which group each trajectory belongs to."""
    environment_indices: torch.Tensor
    """[S] int64, equal for trajectories of the same environment."""
    policy_version: int
    """The version about to be trained; staleness is counted from it."""

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup], policy_version: int) -> "TrainingBatch":
        sizes = torch.tensor([len(group.trajectories) for group in groups])
        environments = [group.environment for group in groups]
        index = torch.tensor([environments.index(name) for name in environments])
        return cls(
            trajectories=tuple(t for group in groups for t in group.trajectories),
            group_indices=torch.arange(len(groups)).repeat_interleave(sizes),
            environment_indices=index.repeat_interleave(sizes),
            policy_version=policy_version,
        )

    @cached_property
    def lengths(self) -> list[int]:
        return [t.num_tokens for t in self.trajectories]

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.from_lengths([t.num_response_tokens for t in self.trajectories])

    @cached_property
    def rewards(self) -> torch.Tensor:
        """[S]"""
        return torch.tensor([t.reward for t in self.trajectories])

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """[S] bool, whether a limit ended the trajectory."""
        return torch.tensor([t.finish_reason.is_truncated for t in self.trajectories])

    @cached_property
    def num_invalid_turns(self) -> torch.Tensor:
        """[S] as the environment counted them; 0 where it does not."""
        return torch.tensor([t.metrics.get(INVALID_TURNS, 0.0) for t in self.trajectories])

    @cached_property
    def greedy_rewards(self) -> torch.Tensor:
        """[S] reward of a greedy completion of the same prompt.

        Raises:
            ConfigError: a generator did not record it.
        """
        recorded = [t.metrics.get(GREEDY_REWARD) for t in self.trajectories]
        if None in recorded:
            raise ConfigError(
                "algorithm.advantage remax needs the reward of a greedy completion, and a group "
                "came without: start every daemon of a run with one configuration"
            )
        return torch.tensor(recorded)

    @cached_property
    def behavior_logprobs(self) -> torch.Tensor:
        """[R]"""
        return self._responses("behavior_logprobs")

    @cached_property
    def staleness(self) -> torch.Tensor:
        """[R] versions between sampling and training, as a distance."""
        return (self.policy_version - self._responses("policy_versions")).abs()

    def pack(
        self, max_tokens: int, device: torch.device, chosen: Sequence[int] | None = None
    ) -> list["MicroBatch"]:
        """Micro-batches of at most `max_tokens` tokens, of all trajectories or those chosen.

        Raises:
            ConfigError: a trajectory alone exceeds `max_tokens`.
        """
        indices = range(len(self.trajectories)) if chosen is None else chosen
        (bins,) = pack([self.lengths[i] for i in indices], max_tokens)
        return [self.micro_batch([indices[i] for i in members], device) for members in bins]

    def micro_batch(self, members: Sequence[int], device: torch.device) -> "MicroBatch":
        """The trajectories with these indices, packed."""
        chosen = [self.trajectories[i] for i in members]
        ids = np.concatenate([t.token_ids for t in chosen])
        is_response = np.concatenate([t.response_mask for t in chosen])
        # The first token of a trajectory is never a response: no token before it predicts it.
        positions = torch.from_numpy(np.flatnonzero(is_response))
        token_ids = torch.from_numpy(ids).long()
        return MicroBatch(
            token_ids=token_ids[None].to(device),
            packing=Packing(tuple(t.num_tokens for t in chosen), device),
            predictors=(positions - 1).to(device),
            targets=token_ids[positions].to(device),
            members=torch.tensor(list(members)),
            responses=self.rows(members),
            sequences=Sequences.from_lengths(self.sequences.lengths[list(members)]),
        )

    def rows(self, members: Sequence[int]) -> torch.Tensor:
        """[R of these trajectories] which response tokens are theirs, in this order."""
        lengths = self.sequences.lengths
        ends = lengths.cumsum(0)
        spans = [torch.arange(int(ends[i] - lengths[i]), int(ends[i])) for i in members]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *spans])

    def _responses(self, field: str) -> torch.Tensor:
        arrays = [getattr(t, field)[t.response_mask] for t in self.trajectories]
        return torch.from_numpy(np.concatenate(arrays))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass: N tokens of some of the step's trajectories."""

    token_ids: torch.Tensor
    """[1, N] int64"""
    packing: Packing
    predictors: torch.Tensor
    """[R] positions in N whose hidden states predict the response tokens."""
    targets: torch.Tensor
    """[R] int64, the response tokens."""
    members: torch.Tensor
    """[S] which of the step's trajectories these are."""
    responses: torch.Tensor
    """[R] which of the step's response tokens these are."""
    sequences: Sequences
