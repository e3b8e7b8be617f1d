"""A process of the plan on a node: a child whose command is run by the supervisor of its bundle.

Invariant: a process that fails is started again by the budget of every child. A generator whose
node is lost, or is not there yet, waits for one, however long; without the learner's or the
buffer's node all end, for a new beginning from the checkpoint.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from streamrl.cli.launchers.ray.cluster import RETRY_S, Group, LostError, Nodes, Place
from streamrl.cli.processes.planned import PlannedChild
from streamrl.error_record import ErrorRecord
from streamrl.errors import EXIT_UNREACHABLE, ConfigError, StreamRLError
from streamrl.placement.plan import PlannedProcess

ABORT_S = 3.0
WAITS = "waits for a node"


class LearnerLostError(StreamRLError):
    """A node of the learner or the buffer is gone."""


@dataclass(kw_only=True)
class RayChild(PlannedChild):
    """`place` is its bundle, of `group`; `family` are all children of the run; `planned` is its
    process by what is known of its node now."""

    nodes: Nodes
    group: Group
    place: Place
    may_wait: bool
    planned: Callable[[str], PlannedProcess]
    family: "list[RayChild]" = field(default_factory=list)
    was_reached: bool = False

    def begin_kill(self) -> bool:
        self.place.signal(self.role, signal.SIGKILL)
        return True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Have the supervisor send the signal. A node that does not answer SIGKILL is given up."""
        self.stopping.set()
        self.place.signal(self.role, number)
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(ABORT_S, self._abort)

    def _abort(self) -> None:
        if self.state == "running":
            self.group.close()

    async def _run(self) -> tuple[int, ErrorRecord | None]:
        """Exit code and record of a process that is started on a node, as often as one is lost.
        Waits for its end, or for a node; `stop` unblocks both."""
        while await self._is_reached():
            process = self.planned(self.role)
            command = process.restart_command if self.num_restarts else process.command
            # The devices are those that Ray has given to the bundle.
            environment = {**self.environment, **process.environment}
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            self.budget.on_start()
            self.state, self.was_reached = "running", True
            try:
                code, record = await self.place.run(
                    self.role, command, environment, self.log_format
                )
                return code, None if record is None else ErrorRecord(*record)
            except LostError:
                self.state = WAITS
                if self.stopping.is_set():
                    break
                self._on_loss()
        return 0, None

    def _on_loss(self) -> None:
        if not self.may_wait:
            for child in self.family:
                child.stop(signal.SIGKILL)
            raise LearnerLostError(f"{self.role}: its node is lost")
        self.group.close()
        self.num_restarts += 1
        self.notify(f"{self.role}: its node is lost; the run goes on without it until it has one")

    async def _is_reached(self) -> bool:
        """Waits until the node is there: True, or until this child is to stop: False."""
        said = ""
        while not self.stopping.is_set() and not self.place.is_ready:
            self.state = WAITS
            waiting = asyncio.create_task(self.stopping.wait())
            reaching = asyncio.create_task(self._reach())
            await asyncio.wait({waiting, reaching}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not reaching.done():
                reaching.cancel()
                return False
            error = reaching.exception()
            if error is not None and not isinstance(error, ConfigError | LostError):
                raise error
            if error is not None:
                if str(error) != said:
                    said = str(error)
                    self.notify(f"{self.role}: {said}")
                self.group.close()
                await asyncio.wait({asyncio.create_task(self.stopping.wait())}, timeout=RETRY_S)
        return not self.stopping.is_set()

    async def _reach(self) -> None:
        await self.nodes.reach(self.group)
        await self.nodes.prepare(self.place)

    def _log(self, sentence: str) -> None:
        """The supervisor has written it into the log, which is on its node."""

    def _delay_s(self, code: int, record: ErrorRecord | None) -> float:
        """A generator that cannot reach the run, on a node that may be lost, tries without an
        end."""
        if code == EXIT_UNREACHABLE and self.may_wait:
            return RETRY_S
        return super()._delay_s(code, record)
