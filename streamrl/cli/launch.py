"""`streamrl launch`: everything a run needs on this machine, as separate processes.

    make the model if its recipe asks for it; compare engine and learner if `parity` sets a
    threshold; start buffer, learner and generators; show their progress; when the learner is done
    or Ctrl-C comes, let everybody go in order; evaluate; report

Invariant: the daemons are those that `streamrl buffer | learner | generator` start, with the same
configuration; the launcher only starts them, again after a crash, and reads the run folder.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from streamrl.cli.parity import gate
from streamrl.cli.processes import Child, call
from streamrl.cli.report import write_report
from streamrl.cli.view import ProgressView, summary
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import StreamRLError
from streamrl.run_folder import prepare, read_json

DRAIN_S = 15.0

Companion: TypeAlias = Callable[[Sequence[Child]], Awaitable[None]]


def main(arguments: argparse.Namespace) -> int:
    console = Console()
    loaded = configuration(arguments)
    config = prepare(loaded.config, resume=arguments.resume, new=arguments.new)
    start = time.monotonic()
    finished = run_here(
        config, console, resume=arguments.resume, new=arguments.new, live=not arguments.no_view
    )
    if finished and config.run.evaluate:
        _evaluate(config)
    write_report(config.run.path)
    console.print(summary(config, time.monotonic() - start))
    if not finished:
        console.print(f"stopped; go on with: streamrl launch {arguments.file} --resume")
    return 0


def run_here(
    config: RunConfig,
    console: Console,
    *,
    resume: bool = False,
    new: bool = False,
    live: bool = False,
    companion: Companion | None = None,
) -> bool:
    """The whole run, from the missing model to the last books; whether it reached its end.

    A buffer server of somebody else's outlives its runs: a new one must not train on what an older
    one left there.
    """
    if not config.buffer.has_daemon and not resume:
        _call("books", config, "--forget" if new else "--require-none")
    if not Path(config.model.path).exists() and config.model.recipe is not None:
        console.print(f"making {config.model.path} (streamrl make-model)")
        _call("make-model", config)
    if config.parity.is_required:
        gate(config, console)
    finished = asyncio.run(
        _run_daemons(config, console, resume=resume, live=live, companion=companion)
    )
    if not config.buffer.has_daemon:
        with contextlib.suppress(StreamRLError):
            _call("books", config)
    return finished


async def _run_daemons(
    config: RunConfig,
    console: Console,
    *,
    resume: bool,
    live: bool,
    companion: Companion | None,
) -> bool:
    """Start, watch, and stop everybody; whether the run reached its end.

    Waits for the learner to end, for a child or the companion to fail for good, or for a signal.
    """
    children = _children(config, resume=resume)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _interrupt, interrupted, children)
    supervised = {child.role: asyncio.create_task(child.supervise()) for child in children}
    view = ProgressView(config, children, console, live=live)
    showing = asyncio.create_task(view.run())
    waiting = asyncio.create_task(interrupted.wait())
    beside = asyncio.create_task(_accompany(companion, children))
    watched = (*supervised.values(), beside)
    try:
        while not (interrupted.is_set() or supervised["learner"].done()):
            await asyncio.wait(
                {waiting, *(task for task in watched if not task.done())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            _raise_failure(watched)
    finally:
        beside.cancel()
        await _stop_in_order(children, supervised)
        showing.cancel()
        waiting.cancel()
        await asyncio.wait({showing, beside})
    _raise_failure(watched)
    return not interrupted.is_set()


async def _accompany(companion: Companion | None, children: Sequence[Child]) -> None:
    """What runs beside the children, if anything; cancelled before they are stopped."""
    if companion is not None:
        await companion(children)


def _children(config: RunConfig, *, resume: bool) -> list[Child]:
    given = ("--config", str(config.run.path / "config.yaml"))
    logs = config.run.path / "logs"

    def child(role: str, *arguments: str, once_more: tuple[str, ...] = ()) -> Child:
        return Child(
            role,
            arguments,
            (*arguments, *once_more),
            logs / f"{role}.log",
            num_sharing=1 + config.generator.count,
        )

    learner = ("learner", *given, *(["--resume"] if resume else []))
    return [
        *([child("buffer", "buffer", *given)] if config.buffer.has_daemon else []),
        child("learner", *learner, once_more=("--resume",)),
        *(
            child(f"generator-{i}", "generator", *given, "--id", f"generator-{i}")
            for i in range(config.generator.count)
        ),
    ]


def _interrupt(interrupted: asyncio.Event, children: list[Child]) -> None:
    if interrupted.is_set():
        for child in children:
            child.stop(signal.SIGKILL)
    interrupted.set()


def _raise_failure(watched: "Sequence[asyncio.Task[Any]]") -> None:
    for task in watched:
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error


async def _stop_in_order(children: list[Child], supervised: "dict[str, asyncio.Task[int]]") -> None:
    """Learner and generators first, so that the buffer hears of every lease; it goes last.

    Waits DRAIN_S for each wave; who is not gone by then is killed, and waited for as long again.
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
            await asyncio.wait(tasks, timeout=DRAIN_S / 3)
        for child in wave:
            child.stop()
        _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
        for child in wave:
            if late:
                child.stop(signal.SIGKILL)
        await asyncio.wait(tasks, timeout=DRAIN_S)


def _call(command: str, config: RunConfig, *arguments: str) -> str:
    """Run a `streamrl` command with this configuration to its end; its output."""
    return call(command, *arguments, "--config", str(config.run.path / "config.yaml"))


def _evaluate(config: RunConfig) -> None:
    """Score the final checkpoint where there are held-out prompts; a run is not lost over it."""
    with contextlib.suppress(StreamRLError):
        _call("evaluate", config)
    found = read_json(config.run.path / "evaluation.json")
    if not found:
        print("no evaluation: see the messages above", file=sys.stderr)
