"""Commands of the first rank, executed by every rank in one order.

The first rank's loop calls `run` and `fetch`; the other ranks are in `follow`. With a single rank a
command is executed and nothing is sent. A command holds everything that the other ranks do not
have.

Invariant: a command is sent only after the previous one was executed here, so no rank waits in a
collective operation that the others do not reach. Computation runs in its own thread. `follow`
waits for the next command as long as the first rank lives.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from msgspec import Struct

from buffers.messages import ErrorReply
from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.executor.liveness import Liveness
from learners.parallel.mesh import OnDemand, full
from learners.parallel.ranks import Ranks
from learners.samples import StepSamples
from learners.session import LearnerState, ends_in_time
from learners.trainer import Trainer
from streamrl.errors import StreamRLError
from streamrl.types import GroupHeader, TrajectoryGroup


class Fetch(Struct, frozen=True, tag="fetch"):
    """Each rank: fetch your share of these groups."""

    headers: tuple[GroupHeader, ...]


class Accumulate(Struct, frozen=True, tag="accumulate"):
    """Add the gradient of these groups, the ones fetched last."""

    headers: tuple[GroupHeader, ...]
    policy_version: int


class Update(Struct, frozen=True, tag="update"):
    """Make the optimizer step."""


class Discard(Struct, frozen=True, tag="discard"):
    """Clear the gradient."""


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """Gather the weights for the first rank to publish."""

    policy_version: int


class Save(Struct, frozen=True, tag="save"):
    """Save a checkpoint of this state."""

    state: LearnerState


class End(Struct, frozen=True, tag="end"):
    """End the learner."""


Computation: TypeAlias = Accumulate | Update | Discard | Snapshot | Save
Command: TypeAlias = Fetch | Computation | End
FetchGroups: TypeAlias = Callable[[Sequence[int]], Awaitable[tuple[TrajectoryGroup, ...]]]
"""(prompt indices)"""
TrainedPart: TypeAlias = tuple[TrainingBatch, Sequence[GroupHeader], Sequence[TrajectoryGroup]]
Record: TypeAlias = Callable[
    [int, Sequence[tuple[Sequence[GroupHeader], Sequence[TrajectoryGroup]]]], None
]
"""(new version; for each part of the batch, its headers and this rank's groups)"""


@dataclass(eq=False)
class LearnerRank:
    """One rank's trainer and callbacks; `execute` carries out each command on them.

    `fetch` is the buffer's; `save` and `snapshot` are called on every rank, in lockstep. `show` and
    `record` get this rank's share of what each step trained on.
    """

    trainer: Trainer
    ranks: Ranks
    fetch: FetchGroups
    save: Callable[[Trainer, LearnerState], object]
    snapshot: Callable[[Mapping[str, torch.Tensor], int], object]
    show: Callable[[StepSamples], None] | None = None
    record: Record | None = None
    _parts: list[TrainedPart] = field(default_factory=list, init=False)

    def execute(self, command: Computation, groups: Sequence[TrajectoryGroup] = ()) -> Any:
        """Runs in the compute thread; `groups` are the ones fetched last."""
        match command:
            case Accumulate(headers, policy_version):
                batch = TrainingBatch.shared(headers, groups, policy_version, self.ranks)
                self._parts.append((batch, headers, groups))
                self.trainer.accumulate(batch)
            case Update():
                metrics = self.trainer.update()
                self._keep_step()
                return metrics
            case Discard():
                self._parts.clear()
                self.trainer.discard()
            case Snapshot(policy_version):
                weights = self.trainer.policy.weights()
                whole = OnDemand(weights, lambda name: full(weights[name]))
                self.snapshot(whole, policy_version)
            case Save(state):
                return self.save(self.trainer, state)

    def _keep_step(self) -> None:
        """Record the trained batch, and show samples of its first part."""
        parts, self._parts = self._parts, []
        batch, _, groups = parts[0]
        if self.record is not None:
            trained = [(headers, fetched) for _, headers, fetched in parts]
            self.record(batch.policy_version + 1, trained)
        if self.show is None:
            return
        numbers = ((i, j) for i, group in enumerate(groups) for j in range(len(group.trajectories)))
        by_place, weights = dict(enumerate(numbers)), self.trainer.take_weights()
        own = {by_place[batch.places[m]]: w for m, w in weights.items() if m in batch.places}
        self.show(StepSamples(batch.policy_version, groups, own))


Result = TypeVar("Result")
GIVE_UP_S = 4.0


class Lockstep:
    """Runs commands on every rank. `ranks` are all ranks of the learner; `liveness` explains a
    failed collective operation; `moves_parameters`: some computations replace parameters for a
    while and restore them."""

    def __init__(
        self,
        rank: LearnerRank,
        ranks: Ranks | None = None,
        liveness: Liveness | None = None,
        *,
        moves_parameters: bool = False,
    ) -> None:
        self._rank = rank
        self._ranks = ranks or Ranks()
        self._liveness = liveness or Liveness()
        self._can_give_up = self._ranks.count == 1 and not moves_parameters
        self._order = asyncio.Lock()
        self._thread = _make_thread()

    @property
    def num_ranks(self) -> int:
        return self._ranks.count

    async def run(self, command: Computation, groups: Sequence[TrajectoryGroup] = ()) -> Any:
        """Execute a command on every rank; the first rank's result. `groups` are the first rank's
        share.

        Waits for its end even after a signal: a step is never cut short.
        """

        def work() -> Any:
            self._ranks.send(command)
            return self._rank.execute(command, groups)

        async with self._order:
            return await self._in_thread(work)

    async def accumulate(
        self, command: Accumulate, groups: Sequence[TrajectoryGroup], stopping: asyncio.Event
    ) -> bool:
        """Add a gradient; false if it was given up, GIVE_UP_S after `stopping` was set.

        Later commands then run in a new thread. Not given up with several ranks, nor with
        `moves_parameters`: the new thread would find parameters half moved.
        """
        adding = asyncio.ensure_future(self.run(command, groups))
        if self._can_give_up and not await ends_in_time(adding, stopping, GIVE_UP_S):
            adding.cancel()
            self._thread.shutdown(wait=False)
            self._thread = _make_thread()
            return False
        await adding
        return True

    async def fetch(self, headers: Sequence[GroupHeader]) -> tuple[TrajectoryGroup, ...]:
        """The first rank's share of these groups, once every rank has fetched its own.

        Raises:
            StreamRLError: from the first rank that could not fetch; no rank keeps groups then.
        """
        command = Fetch(tuple(headers))
        async with self._order:
            await self._in_thread(lambda: self._ranks.send(command))
            groups, failures = await self._fetch(command)
        if failures:
            raise failures[0].exception()
        return groups

    async def follow(self) -> None:
        """Execute the first rank's commands, until it ends the learner."""
        groups: tuple[TrajectoryGroup, ...] = ()
        while True:
            command: Command = await self._in_thread(lambda: self._ranks.receive(Command))
            match command:
                case End():
                    return
                case Fetch():
                    groups, _ = await self._fetch(command)
                case _:
                    await self._in_thread(partial(self._rank.execute, command, groups))

    async def end(self) -> None:
        """End the other ranks, and the compute thread."""
        if self._ranks.index == 0:
            await self._in_thread(lambda: self._ranks.send(End()))
        self._thread.shutdown()

    async def _fetch(
        self, command: Fetch
    ) -> tuple[tuple[TrajectoryGroup, ...], Sequence[ErrorReply]]:
        """This rank's groups in batch order, and the failures of all ranks."""
        groups: tuple[TrajectoryGroup, ...] = ()
        failed: tuple[ErrorReply, ...] = ()
        headers = share(command.headers, self._rank.ranks.count, self._rank.ranks.index)
        try:
            groups = await self._rank.fetch([header.prompt_index for header in headers])
        except StreamRLError as error:
            failed = (ErrorReply.of(error),)
        gathered = await self._in_thread(lambda: self._ranks.gather(failed, tuple[ErrorReply, ...]))
        return groups, [failure for of_rank in gathered for failure in of_rank]

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        def explained() -> Result:
            with self._liveness.explained():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, explained)


def _make_thread() -> ThreadPoolExecutor:
    """The compute thread, on this thread's GPU; a new thread would use GPU 0."""
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    begin = None if gpu is None else partial(torch.cuda.set_device, gpu)
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute", initializer=begin)
