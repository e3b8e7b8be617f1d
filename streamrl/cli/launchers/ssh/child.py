"""A process of the plan on a host of the run: a child whose command is run by the host's agent.

Invariant: a process that fails is started again by the budget of every child; one whose host was
lost is started again when the host answers, however often.
"""

import asyncio
import signal
from dataclasses import dataclass

from streamrl.cli.launchers.ssh.connection import Connection, HostLostError
from streamrl.cli.launchers.ssh.frames import Start
from streamrl.cli.launchers.ssh.link import HostLink
from streamrl.cli.processes.planned import PlannedChild
from streamrl.error_record import ErrorRecord
from streamrl.errors import EXIT_UNREACHABLE

ABORT_S = 3.0
UNREACHABLE_DELAY_S = 5.0


@dataclass(kw_only=True)
class RemoteChild(PlannedChild):
    """`link` is that of its host."""

    link: HostLink

    def begin_kill(self) -> bool:
        if self.link.connection is None:
            return False
        self.link.connection.signal(self.role, signal.SIGKILL)
        return True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Have the agent send the signal. A host that does not answer SIGKILL is given up."""
        self.stopping.set()
        connection = self.link.connection
        if connection is None:
            return
        connection.signal(self.role, number)
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(ABORT_S, self._abort, connection)

    def _abort(self, connection: Connection) -> None:
        if self.state == "running":
            connection.abort()

    async def _run(self) -> tuple[int, ErrorRecord | None]:
        """Exit code and record of a process that is started on the host, as often as the host is
        lost. Waits for its end, or for the host to answer; `stop` unblocks both."""
        while await self._is_ready():
            connection = self.link.connection
            assert connection is not None, "the host is ready"
            self.budget.on_start()
            self.state = "running"
            try:
                ended = await connection.run(self._start_frame())
                return ended.exit_code, ended.record
            except HostLostError:
                self.num_restarts += 1
                self.state = f"waits for host {self.link.host}"
        return 0, None

    async def _is_ready(self) -> bool:
        """Waits until the host is ready: True, or until this child is to stop: False."""
        waiting = [asyncio.create_task(event.wait()) for event in (self.link.ready, self.stopping)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return not self.stopping.is_set()

    def _start_frame(self) -> Start:
        command = self.restart_arguments if self.num_restarts else self.arguments
        return Start(name=self.role, command=tuple(command), environment=dict(self.environment))

    def _log(self, sentence: str) -> None:
        """The agent has written it into the log, which comes from there."""

    def _delay_s(self, code: int, record: ErrorRecord | None) -> float:
        """A generator that cannot reach the run, on a host that may fail, tries without an end."""
        if code == EXIT_UNREACHABLE and self.link.may_fail:
            return UNREACHABLE_DELAY_S
        return super()._delay_s(code, record)
