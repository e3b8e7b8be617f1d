"""What the first rank of a learner decides, as commands that every rank executes in its order.

Invariant: a command holds all that the other ranks do not have; what it does to a rank is
`LearnerRank.execute`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from msgspec import Struct

from learners.batch import TrainingBatch
from learners.parallel.plan import share
from learners.parallel.ranks import Ranks
from learners.parallel.sharding import full
from learners.samples import StepSamples
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.types import GroupHeader, TrajectoryGroup


class Fetch(Struct, frozen=True, tag="fetch"):
    """Fetch this rank's share of the groups."""

    headers: tuple[GroupHeader, ...]


class Accumulate(Struct, frozen=True, tag="accumulate"):
    """Add the gradient of these groups, which were fetched last."""

    headers: tuple[GroupHeader, ...]
    policy_version: int


class Update(Struct, frozen=True, tag="update"):
    """Make the step."""


class Discard(Struct, frozen=True, tag="discard"):
    """Clear the gradient."""


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """Gather the weights for the first rank to publish."""

    policy_version: int


class Save(Struct, frozen=True, tag="save"):
    """Save a checkpoint of this state."""

    state: LearnerState


class End(Struct, frozen=True, tag="end"):
    """The learner ends."""


Computation: TypeAlias = Accumulate | Update | Discard | Snapshot | Save
Command: TypeAlias = Fetch | Computation | End
FetchGroups: TypeAlias = Callable[[Sequence[int]], Awaitable[tuple[TrajectoryGroup, ...]]]
"""(prompt indices)"""
Record: TypeAlias = Callable[
    [int, Sequence[tuple[Sequence[GroupHeader], Sequence[TrajectoryGroup]]]], None
]
"""(version that was made, the headers and this rank's groups of each part)"""


class LearnerRank:
    """What one rank holds, and what each command does to it.

    `fetch` is the buffer's; `save` and `snapshot` are called on every rank, in lockstep. `show`
    and `record` get what each step has trained on, of this rank's share.
    """

    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        *,
        fetch: FetchGroups,
        save: Callable[[Trainer, LearnerState], object],
        snapshot: Callable[[Mapping[str, torch.Tensor], int], object],
        show: Callable[[StepSamples], None] | None = None,
        record: Record | None = None,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._fetch = fetch
        self._save = save
        self._snapshot = snapshot
        self._show = show
        self._record = record
        self._parts: tuple[tuple[Sequence[GroupHeader], Sequence[TrajectoryGroup]], ...] = ()
        self._first: tuple[TrainingBatch, Sequence[TrajectoryGroup]] | None = None

    async def fetch(self, command: Fetch) -> tuple[TrajectoryGroup, ...]:
        """The groups of this rank's share, in the order of the batch."""
        headers = share(command.headers, self._ranks.count, self._ranks.index)
        return await self._fetch([header.prompt_index for header in headers])

    def execute(self, command: Computation, groups: Sequence[TrajectoryGroup] = ()) -> Any:
        """In the compute thread; `groups` are those that were fetched last."""
        match command:
            case Accumulate(headers, policy_version):
                batch = TrainingBatch.shared(headers, groups, policy_version, self._ranks)
                self._first = self._first or (batch, groups)
                if self._record is not None:
                    self._parts = (*self._parts, (headers, groups))
                self._trainer.accumulate(batch)
            case Update():
                metrics = self._trainer.update()
                self._record_step()
                self._show_samples()
                return metrics
            case Discard():
                self._first, self._parts = None, ()
                self._trainer.discard()
            case Snapshot(policy_version):
                self._snapshot(Gathered(self._trainer.policy.weights()), policy_version)
            case Save(state):
                return self._save(self._trainer, state)

    def _record_step(self) -> None:
        parts, self._parts = self._parts, ()
        if self._record is not None and self._first is not None:
            self._record(self._first[0].policy_version + 1, parts)

    def _show_samples(self) -> None:
        """Of the first part of the batch that was trained."""
        first, self._first = self._first, None
        if self._show is None or first is None:
            return
        (batch, groups), weights = first, self._trainer.take_weights()
        numbers = ((i, j) for i, group in enumerate(groups) for j in range(len(group.trajectories)))
        by_place = dict(enumerate(numbers))
        own = {by_place[batch.places[m]]: w for m, w in weights.items() if m in batch.places}
        self._show(StepSamples(batch.policy_version, groups, own))


class Gathered(Mapping[str, torch.Tensor]):
    """Parameters that are whole while they are read, one at a time: every rank reads all of them,
    in the same order."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return full(self._parameters[name])

    def __iter__(self) -> Any:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
