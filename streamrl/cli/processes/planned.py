"""The children of a plan whose processes run elsewhere: on hosts, or as steps of a job.

Invariant: the parts of one learner run together: when one fails, all are started again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from streamrl.cli.processes.child import Child
from streamrl.cli.processes.daemons import newest_step
from streamrl.cli.processes.restarts import RestartBudget
from streamrl.log_lines import FORMAT_VARIABLE
from streamrl.placement.plan import Plan, PlannedProcess


@dataclass(kw_only=True)
class PlannedChild(Child, ABC):
    """`arguments` and `restart_arguments` are whole commands; `companions` the other parts of the
    same learner."""

    companions: "Sequence[PlannedChild]" = ()
    is_ended_by_companion: bool = False

    @abstractmethod
    def begin_kill(self) -> bool:
        """Have the process killed; False if nobody can be told to."""

    def end_with_companion(self) -> None:
        """End the process at once, for a restart."""
        if self.state == "running" and self.begin_kill():
            self.is_ended_by_companion = True

    def end_companions(self, exit_code: int) -> None:
        """End the other parts, if this process has failed by itself."""
        if exit_code != 0 and not self.is_ended_by_companion and not self.stopping.is_set():
            for companion in self.companions:
                companion.end_with_companion()
        self.is_ended_by_companion = False


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
