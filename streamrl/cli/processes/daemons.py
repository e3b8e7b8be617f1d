"""Starts and watches the daemons of a run, and stops them in order.

Invariant: the daemons are those of the plan, each a command that a person could type. The launcher
only starts them and reads the run folder.
"""

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from streamrl.cli.processes.command import on_orders
from streamrl.cli.processes.restarts import Child, RestartBudget
from streamrl.errors import EXIT_UNREACHABLE, Interrupted, StreamRLError
from streamrl.log_lines import FORMAT_VARIABLE
from streamrl.placement.plan import Plan, PlannedProcess
from streamrl.tracking.jsonl import TRAINED_FILE, read_last

GRACE_PERIOD_S = 15.0
"""A third of this is the time for processes to end by themselves after the learner has."""
# Seconds before the end of `stop_within_s` at which the others, then the buffer, are killed; the
# rest is for reporting.
_OTHERS_S, _BUFFER_S = 6.0, 4.0
_BUFFER_ENDS_S, _KILL_S = 3.0, 1.0
REASON_S = 3.0

log = logging.getLogger(__name__)


BackgroundTask: TypeAlias = Callable[[Sequence[Child]], Awaitable[None]]


async def supervise(
    children: Sequence[Child],
    *,
    view: BackgroundTask,
    notify: Callable[[str], None],
    background: BackgroundTask | None = None,
    stop_s: float,
    strict: bool = False,
) -> StreamRLError | None:
    """Start, watch and stop every child. Return the failure of the validator if the run went on
    without it, for the launch's exit code.

    `notify` gets a sentence at the first signal. `background` is cancelled before the daemons are
    stopped, `view` after that. Waits for the learner to end, for a child or `background` to fail,
    or for a signal; within `stop_s` after that no process is left. Under `strict` a failed child is
    not restarted.

    Raises:
        Interrupted: a signal stopped the run before its end.
        StreamRLError: a process failed and is not restarted.
    """
    for child in children:
        child.is_strict = strict
    interrupted: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    with on_orders(partial(_on_order, interrupted, children, notify)):
        supervised = {child.role: asyncio.create_task(child.supervise()) for child in children}
        showing = asyncio.ensure_future(view(children))
        showing.add_done_callback(_say_failure)
        beside = asyncio.ensure_future(background(children) if background else asyncio.sleep(0))
        watched: tuple[asyncio.Future[Any], ...] = (*supervised.values(), beside)
        try:
            while not (interrupted.done() or supervised["learner"].done() or _failure(watched)):
                running = [task for task in (interrupted, *watched) if not task.done()]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped_by = interrupted.result() if interrupted.done() else None
            beside.cancel()
            await _stop_in_order(children, supervised, interrupted, stop_s)
            showing.cancel()
            await asyncio.wait({showing, beside})
    if failure := _failure(watched):
        raise failure
    if stopped_by is not None:
        raise Interrupted(stopped_by)
    return next((c.failure for c in children if c.role == "validator" and c.failure), None)


def newest_step(folder: Path) -> int:
    step: int = read_last(folder / TRAINED_FILE).get("step", 0)
    return step


def _on_order(
    interrupted: "asyncio.Future[signal.Signals]",
    children: Sequence[Child],
    notify: Callable[[str], None],
    number: signal.Signals,
) -> None:
    """At the first signal, stop the run and say so; at the second one, kill its processes."""
    if not interrupted.done():
        interrupted.set_result(number)
        again = "Ctrl-C again" if number is signal.SIGINT else "a second signal"
        notify(f"finishing the step and saving it; {again} stops now")
        return
    for child in children:
        child.stop(signal.SIGKILL)


def _say_failure(view: "asyncio.Future[None]") -> None:
    """Log that the view failed; the run goes on without it."""
    if not view.cancelled() and (error := view.exception()) is not None:
        log.error("the view of the run has failed; the run goes on", exc_info=error)


def _failure(watched: "Sequence[asyncio.Future[Any]]") -> BaseException | None:
    """The first failure. Reads all of them, since asyncio reports unread ones."""
    ended = [task for task in watched if task.done() and not task.cancelled()]
    return next(iter([error for task in ended if (error := task.exception())]), None)


async def _stop_in_order(
    children: Sequence[Child],
    supervised: "Mapping[str, asyncio.Task[int]]",
    interrupted: "asyncio.Future[signal.Signals]",
    stop_s: float,
) -> None:
    """Stop learner and generators first, so that the buffer gets every lease back, and the buffer
    last. A buffer that is still starting is stopped with the others: no leases exist yet, and the
    others may be waiting for the fork server behind it.

    Waits for each wave until at most _OTHERS_S or _BUFFER_S before `stop_s` is over, then kills
    what still runs.
    """
    loop, by_s = asyncio.get_running_loop(), 0.0
    learner = supervised["learner"]
    learner_ended = learner.done() and learner.exception() is None
    last = [c for c in children if c.role == "buffer" and c.state != "starting"]
    waves = ([c for c in children if c not in last], last)
    for wave in waves:
        is_running = all(c.state in ("running", "done") for c in wave)
        ends_by_itself = learner_ended and is_running and wave is not last
        tasks = {supervised[child.role] for child in wave}
        if not tasks:
            continue
        if ends_by_itself and not interrupted.done():
            ended = asyncio.create_task(asyncio.wait(tasks))
            first: set[asyncio.Future[Any]] = {ended, interrupted}
            within_s, when = GRACE_PERIOD_S / 3, asyncio.FIRST_COMPLETED
            await asyncio.wait(first, timeout=within_s, return_when=when)
            ended.cancel()
        for child in wave:
            child.stop()
        if by_s:
            ends_s = GRACE_PERIOD_S / 2 if learner_ended else _BUFFER_ENDS_S
            by_s = min(by_s + _OTHERS_S - _BUFFER_S, loop.time() + ends_s)
        else:
            by_s = loop.time() + stop_s - _OTHERS_S
        _, late = await asyncio.wait(tasks, timeout=max(_KILL_S, by_s - loop.time()))
        for child in wave:
            if late:
                child.stop(signal.SIGKILL)
        await asyncio.wait(tasks, timeout=_KILL_S)


@dataclass(kw_only=True)
class RemoteChild(Child, ABC):
    """A child that runs elsewhere: on a node, or as a step of a job. The parts of one learner run
    together: when one fails, the other parts, its `companions`, are restarted, too."""

    companions: "Sequence[RemoteChild]" = ()
    is_ended_by_companion: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, briefly, whenever a process ends."""

    @abstractmethod
    def begin_kill(self) -> None:
        """Have the process killed; do not wait for it."""

    async def _on_end(self, code: int) -> None:
        """End the other parts, if this process failed by itself. If it failed because it lost
        another part, first wait up to REASON_S for that part to end, since it may say why."""
        self.has_ended.set()
        self.has_ended.clear()
        has_failed = code != 0 and not self.is_ended_by_companion and not self.is_strict
        self.is_ended_by_companion = False
        if not has_failed or self.stopping.is_set():
            return
        starts = [(companion, companion.num_restarts) for companion in self.companions]
        if code == EXIT_UNREACHABLE and self.companions:
            ends = [asyncio.create_task(other.has_ended.wait()) for other in self.companions]
            await asyncio.wait(ends, timeout=REASON_S)
            for end in ends:
                end.cancel()
        for companion, num_restarts in starts:
            if companion.num_restarts == num_restarts and companion.state == "running":
                companion.begin_kill()
                companion.is_ended_by_companion = True


C = TypeVar("C", bound=Child)


def make_children(
    kind: Callable[..., C],
    plan: Plan,
    notify: Callable[[str], None],
    own: Callable[[PlannedProcess], Mapping[str, Any]],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[C]:
    """Make one child for each process of the plan. `notify` gets a sentence for each restart, `own`
    returns further fields of this kind of child, all children get `environment`."""
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
            environment={**environment, FORMAT_VARIABLE: run.log_format, **process.environment},
            is_optional=process.is_optional,
            log_format=run.log_format,
            **own(process),
        )
        for process in plan.processes
    ]
    learners = [c for c in children if isinstance(c, RemoteChild) and c.role.startswith("learner")]
    for learner in learners:
        learner.companions = [other for other in learners if other is not learner]
    return children
