"""The learner's host as the place of commands that are run once: those about the buffer's books,
and the evaluation of the final checkpoint.

Invariant: what they write is in the learner's run folder, and comes from there.
"""

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from streamrl.cli.launchers.ssh.connection import Connection, HostLostError, first_of
from streamrl.cli.launchers.ssh.frames import Ended, Start
from streamrl.cli.launchers.ssh.link import HostLink
from streamrl.cli.launchers.ssh.secrets import handed_on
from streamrl.cli.processes.restarts import sentence_of
from streamrl.errors import Interrupted, error_of
from streamrl.placement.plan import Plan

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LearnerHost:
    """`kept` are the tasks that keep the links."""

    def __init__(
        self, plan: Plan, links: Sequence[HostLink], kept: "Sequence[asyncio.Task[None]]"
    ) -> None:
        self._plan = plan
        self._learner = next(process for process in plan.processes if process.name == "learner")
        self._link = next(link for link in links if link.host == self._learner.host)
        self._kept = kept

    async def call(self, command: str, *arguments: str) -> None:
        """Run `streamrl COMMAND` there. Waits for its end, for the host, or for a signal.

        Raises:
            StreamRLError: it failed; of the failure's kind. Or a host was lost.
            Interrupted: a signal came first.
        """
        file = str(self._plan.config_file)
        start = Start(
            name=command.split()[-1],
            command=("streamrl", *command.split(), *arguments, "--config", file),
            environment={**handed_on(self._plan.config), **self._learner.environment},
        )
        ended = await _unless_signaled(self._run(start))
        if ended.exit_code != 0:
            sentence = sentence_of(ended.exit_code, ended.record)
            raise error_of(ended.exit_code, f"{command}: {sentence}")

    async def _run(self, start: Start) -> Ended:
        return await (await self._ready()).run(start)

    async def _ready(self) -> Connection:
        """Waits until the host is ready; a host that cannot be kept ends that."""
        ready = asyncio.create_task(self._link.ready.wait())
        await asyncio.wait({ready, *self._kept}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        for task in self._kept:
            if task.done():
                task.result()
        if self._link.connection is None:
            raise HostLostError(f"host {self._link.host} is lost")
        return self._link.connection


async def _unless_signaled(work: Coroutine[Any, Any, Ended]) -> Ended:
    """The work's result; a signal cancels it."""
    loop = asyncio.get_running_loop()
    signaled: asyncio.Future[signal.Signals] = loop.create_future()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _note, signaled, number)
    task = asyncio.create_task(work)
    try:
        await first_of(task, signaled)
        if not task.done():
            task.cancel()
            raise Interrupted(signaled.result())
        return task.result()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _note(signaled: "asyncio.Future[signal.Signals]", number: signal.Signals) -> None:
    if not signaled.done():
        signaled.set_result(number)
