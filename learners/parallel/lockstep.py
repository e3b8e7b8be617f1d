"""Commands of the first rank, executed by every rank in one order.

The first rank's loop calls `run` and `fetch`; the other ranks are in `follow`. In a world of one a
command is executed and nothing is sent.

Invariant: a command is sent only once the one before it was executed here, so no rank waits in a
collective operation that the others do not reach. Computation has a thread of its own. `follow`
waits for the next command, as long as the first rank lives.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from buffers.messages import ErrorReply
from learners.parallel.commands import (
    Accumulate,
    Command,
    Computation,
    End,
    Fetch,
    LearnerRank,
)
from learners.parallel.liveness import Liveness
from learners.parallel.ranks import Ranks
from streamrl.errors import StreamRLError
from streamrl.types import GroupHeader, TrajectoryGroup

Result = TypeVar("Result")
GIVE_UP_S = 4.0


class Lockstep:
    """`ranks` are all of the learner's; `liveness` explains a collective operation that failed;
    `is_sharded`: parameters change their form while they are used."""

    def __init__(
        self,
        rank: LearnerRank,
        ranks: Ranks | None = None,
        liveness: Liveness | None = None,
        *,
        is_sharded: bool = False,
    ) -> None:
        self._rank = rank
        self._ranks = ranks or Ranks()
        self._liveness = liveness or Liveness()
        self._can_give_up = self._ranks.count == 1 and not is_sharded
        self._order = asyncio.Lock()
        self._thread = _make_thread()

    @property
    def num_ranks(self) -> int:
        return self._ranks.count

    async def run(self, command: Computation, groups: Sequence[TrajectoryGroup] = ()) -> Any:
        """What the first rank returns; `groups` are those of its share.

        Waits for its end, signals or not: a step is never torn.
        """

        def work() -> Any:
            self._ranks.send(command)
            return self._rank.execute(command, groups)

        async with self._order:
            return await self._in_thread(work)

    async def accumulate(
        self, command: Accumulate, groups: Sequence[TrajectoryGroup], stopping: asyncio.Event
    ) -> bool:
        """Whether the gradient was added, which is given up GIVE_UP_S after `stopping` is set.

        What follows is then executed in another thread. Not with several ranks, nor where
        parameters are offloaded: the other thread would find them in the middle of a move.
        """
        adding = asyncio.ensure_future(self.run(command, groups))
        if self._can_give_up:
            stopped = asyncio.create_task(stopping.wait())
            await asyncio.wait({adding, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            await asyncio.wait({adding}, timeout=GIVE_UP_S)
            if not adding.done():
                adding.cancel()
                self._thread.shutdown(wait=False)
                self._thread = _make_thread()
                return False
        await adding
        return True

    async def fetch(self, headers: Sequence[GroupHeader]) -> tuple[TrajectoryGroup, ...]:
        """The first rank's share of these groups, once every rank has its own.

        Raises:
            StreamRLError: of the first rank that could not fetch; then no rank keeps groups.
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
                    await self._execute(command, groups)

    async def end(self) -> None:
        """End the other ranks, and the compute thread."""
        if self._ranks.index == 0:
            await self._in_thread(lambda: self._ranks.send(End()))
        self._thread.shutdown()

    async def _execute(self, command: Computation, groups: Sequence[TrajectoryGroup]) -> None:
        await self._in_thread(lambda: self._rank.execute(command, groups))

    async def _fetch(
        self, command: Fetch
    ) -> tuple[tuple[TrajectoryGroup, ...], Sequence[ErrorReply]]:
        """This rank's groups, and the failures of all ranks."""
        groups: tuple[TrajectoryGroup, ...] = ()
        failed: tuple[ErrorReply, ...] = ()
        try:
            groups = await self._rank.fetch(command)
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
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
