"""The children of a plan whose processes run elsewhere: on hosts, or as steps of a job.

Invariant: the parts of one learner run together: when one fails, all are started again.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from streamrl.cli.processes.child import Child
from streamrl.cli.processes.daemons import newest_step
from streamrl.cli.processes.restarts import RestartBudget
from streamrl.errors import EXIT_UNREACHABLE
from streamrl.log_lines import FORMAT_VARIABLE
from streamrl.placement.plan import Plan, PlannedProcess

REASON_S = 3.0


@dataclass(kw_only=True)
class PlannedChild(Child, ABC):
    """`arguments` and `restart_arguments` are whole commands; `companions` the other parts of the
    same learner."""

    companions: "Sequence[PlannedChild]" = ()
    is_ended_by_companion: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set for whoever waits as a process ends."""

    @abstractmethod
    def begin_kill(self) -> bool:
        """Have the process killed; False if nobody can be told to."""

    def end_with_companion(self) -> None:
        """End the process at once, for a restart."""
        if self.state == "running" and self.begin_kill():
            self.is_ended_by_companion = True

    async def _on_end(self, code: int) -> None:
        """End the other parts, if this process has failed by itself. Where it has lost another
        part, waits up to REASON_S for that one to end, which may say why."""
        self.has_ended.set()
        self.has_ended.clear()
        has_failed = code != 0 and not self.is_ended_by_companion and not self.is_strict
        self.is_ended_by_companion = False
        if not has_failed or self.stopping.is_set():
            return
        starts = [(companion, companion.num_restarts) for companion in self.companions]
        if code == EXIT_UNREACHABLE and self.companions:
            await self._wait_for_reason()
        for companion, num_restarts in starts:
            if companion.num_restarts == num_restarts:
                companion.end_with_companion()

    async def _wait_for_reason(self) -> None:
        """Until the other parts have ended by themselves, or for REASON_S."""
        ends = [asyncio.create_task(companion.has_ended.wait()) for companion in self.companions]
        await asyncio.wait(ends, timeout=REASON_S)
        for end in ends:
            end.cancel()


C = TypeVar("C", bound=PlannedChild)


def planned_children(
    kind: Callable[..., C],
    plan: Plan,
    notify: Callable[[str], None],
    own: Callable[[PlannedProcess], Mapping[str, Any]],
    environment: Mapping[str, str],
) -> list[C]:
    """One for each process; `own` are the fields of its kind, `environment` that of all."""
    run = plan.config.run
    read_step = partial(newest_step, run.path)
    children = [
        kind(
            process.name,
            process.command,
            process.restart_command,
            run.path / "logs" / f"{process.name}.log",
            RestartBudget(run, read_step()),
            read_step,
            notify,
            environment={
                **environment,
                FORMAT_VARIABLE: run.log_format,
                **process.environment,
            },
            is_optional=process.is_optional,
            log_format=run.log_format,
            **own(process),
        )
        for process in plan.processes
    ]
    learners = [child for child in children if child.role.startswith("learner")]
    for child in learners:
        child.companions = [other for other in learners if other is not child]
    return children
