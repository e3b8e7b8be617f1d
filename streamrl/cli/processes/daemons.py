"""All daemons of a run on this machine: which, how they are watched, in which order they stop.

Invariant: the daemons are those that `streamrl buffer | learner | generator` start, with the same
configuration; the launcher starts them and reads the run folder, and takes no other part.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from streamrl.cli.processes.child import Child
from streamrl.config import RunConfig

GRACE_PERIOD_S = 15.0

BackgroundTask: TypeAlias = Callable[[Sequence[Child]], Awaitable[None]]


async def run_daemons(
    config: RunConfig,
    *,
    resume: bool,
    view: BackgroundTask,
    background: BackgroundTask | None,
) -> bool:
    """Start, watch, and stop every daemon; whether the run reached its end.

    `background` is cancelled before the daemons are stopped, `view` after that. Waits for the
    learner to end, for a child or `background` to fail, or for a signal.
    """
    children = make_children(config, resume=resume)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, interrupted, children)
    supervised = {child.role: asyncio.create_task(child.supervise()) for child in children}
    showing = asyncio.ensure_future(view(children))
    interrupt = asyncio.create_task(interrupted.wait())
    beside = asyncio.create_task(_run_background(background, children))
    watched = (*supervised.values(), beside)
    try:
        while not (interrupted.is_set() or supervised["learner"].done()):
            await asyncio.wait(
                {interrupt, *(task for task in watched if not task.done())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            _raise_failure(watched)
    finally:
        beside.cancel()
        await _stop_in_order(children, supervised)
        showing.cancel()
        interrupt.cancel()
        await asyncio.wait({showing, beside})
    _raise_failure(watched)
    return not interrupted.is_set()


def make_children(config: RunConfig, *, resume: bool) -> list[Child]:
    given = ("--config", str(config.run.path / "config.yaml"))
    logs = config.run.path / "logs"

    def child(role: str, *arguments: str, on_restart: tuple[str, ...] = ()) -> Child:
        return Child(
            role,
            arguments,
            (*arguments, *on_restart),
            logs / f"{role}.log",
            num_sharing=1 + config.generator.count,
        )

    learner = ("learner", *given, *(["--resume"] if resume else []))
    return [
        *([child("buffer", "buffer", *given)] if config.buffer.has_daemon else []),
        child("learner", *learner, on_restart=("--resume",)),
        *(
            child(f"generator-{i}", "generator", *given, "--id", f"generator-{i}")
            for i in range(config.generator.count)
        ),
    ]


async def _run_background(background: BackgroundTask | None, children: Sequence[Child]) -> None:
    if background is not None:
        await background(children)


def _on_signal(interrupted: asyncio.Event, children: Sequence[Child]) -> None:
    if interrupted.is_set():
        for child in children:
            child.stop(signal.SIGKILL)
    interrupted.set()


def _raise_failure(watched: "Sequence[asyncio.Task[Any]]") -> None:
    for task in watched:
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error


async def _stop_in_order(
    children: Sequence[Child], supervised: "Mapping[str, asyncio.Task[int]]"
) -> None:
    """Learner and generators first, so that the buffer gets every lease back; the buffer last.

    Waits GRACE_PERIOD_S for each wave, kills what still runs, and waits as long again.
    """
    learner_ended = supervised["learner"].done()
    waves = (
        [c for c in children if c.role != "buffer"],
        [c for c in children if c.role == "buffer"],
    )
    for wave in waves:
        ends_by_itself = learner_ended and all(c.state in ("running", "done") for c in wave)
        tasks = {supervised[child.role] for child in wave}
        if not tasks:
            continue
        if ends_by_itself:
            await asyncio.wait(tasks, timeout=GRACE_PERIOD_S / 3)
        for child in wave:
            child.stop()
        _, late = await asyncio.wait(tasks, timeout=GRACE_PERIOD_S)
        for child in wave:
            if late:
                child.stop(signal.SIGKILL)
        await asyncio.wait(tasks, timeout=GRACE_PERIOD_S)
