"""A launch with faults at random steps, and the audit of its run.

    PYTHONPATH=. python -m tests.research.chaos configs/quickstart.yaml --seed 1 --kills 20
    ... --kills 3 --resumes 2 --damages 2 --full-disks 1
    ... --removals 1 --losses 1 --fresh-starts 1

Runs what `streamrl launch --new` runs and injects what `tests.research.faults` plans from the
seed; the supervisor restarts what was killed. Each step that the learner makes, also one
that a later fault undoes, is held against the bound on staleness. After `run.max_steps` and the
last fault the learner is asked to end, and the run is audited as by `streamrl buffer audit`. Exit
code 1 if anything is not in order.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from unittest import mock

from rich.console import Console

from streamrl.checkpoints.find import checkpoints_of
from streamrl.checkpoints.history import read_history
from streamrl.cli.arguments import options
from streamrl.cli.launch import run_here
from streamrl.cli.processes import restarts
from streamrl.cli.processes.fork_server import forking
from streamrl.cli.processes.restarts import Child
from streamrl.cli.processes.run_commands import sole_launch
from streamrl.config import RunConfig
from streamrl.config.loading.load import configuration
from streamrl.durable_files import write_file
from streamrl.errors import EXIT_CONFIG, ConfigError
from streamrl.run_folder import prepare
from tests.research.endless import audit as audit_of, end, endless
from tests.research.faults import (
    LEARNER,
    Fault,
    FaultKind,
    complete_checkpoints,
    damage_newest,
    full_disk,
    older_checkpoint,
    plan,
    refused_start,
    remove_all,
    remove_newest,
)
from tests.research.processes import family_of, process_table
from tests.research.progress import Progress
from tests.research.script import add_stall_timeout, run_script

_POLL_S = 0.02
_DISK_FULL_S = 60.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chaos", description="kill daemons of a run at random steps, then audit the run"
    )
    options.config(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the plan of faults; default: 0")
    for name, default, what in (
        ("kills", 5, "daemons that are killed"),
        ("resumes", 0, "times that the learner goes on from an older checkpoint"),
        ("damages", 0, "times that the newest checkpoint is damaged"),
        ("full-disks", 0, "times that the learner's disk is full for some steps"),
        ("removals", 0, "times that the newest checkpoint is removed"),
        ("losses", 0, "times that every checkpoint is removed"),
        ("fresh-starts", 0, "learners that are started without --resume, and have to be refused"),
    ):
        help_text = f"{what}; default: {default}"
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    add_stall_timeout(parser)
    return parser


def main(arguments: argparse.Namespace) -> int:
    console = Console(soft_wrap=True)
    counts = _counts(arguments)
    config = configuration(arguments).config
    _require_checkpoints(config, counts)
    # A hundred faults that this script causes are not a program that fails again and again.
    at_once = mock.patch.object(restarts, "LONGEST_DELAY_S", restarts.FIRST_DELAY_S)
    with sole_launch(config.run.path), at_once:
        killer = Killer(config, counts, arguments, console)
        config = prepare(endless(config, sum(counts.values())), resume=False, new=True)
        with forking() as fork_server:
            run_here(config, console, new=True, fork_server=fork_server, background=killer.run)
    audit = audit_of(config)
    faults = [*killer.wrong, *audit.faults]
    injected = [asdict(fault) for fault in killer.injected]
    record = {
        "seed": arguments.seed,
        "injected": injected,
        "findings": audit.findings,
        "faults": faults,
    }
    write_file(config.run.path / "chaos.json", json.dumps(record, indent=1) + "\n")
    console.print(f"{len(injected)} faults were injected (seed {arguments.seed})")
    for line in (*audit.findings, *(f"WRONG: {fault}" for fault in faults)):
        console.print(line)
    return 1 if faults else 0


def _counts(arguments: argparse.Namespace) -> dict[FaultKind, int]:
    counts = {
        FaultKind.KILL: arguments.kills,
        FaultKind.RESUME: arguments.resumes,
        FaultKind.DAMAGE: arguments.damages,
        FaultKind.FULL_DISK: arguments.full_disks,
        FaultKind.REMOVAL: arguments.removals,
        FaultKind.LOSS: arguments.losses,
        FaultKind.FRESH_START: arguments.fresh_starts,
    }
    for kind, count in counts.items():
        if count < 0:
            raise ConfigError(f"{kind.option}: was {count}; it must be >= 0")
    if not any(counts.values()):
        raise ConfigError("--kills: was 0, and no other fault is asked for")
    return counts


def _require_checkpoints(config: RunConfig, counts: Mapping[FaultKind, int]) -> None:
    settings = config.learner.checkpoint
    asked = [kind.option for kind in FaultKind if kind.num_checkpoints > 1 and counts[kind]]
    if settings.keep < 2 and asked:
        raise ConfigError(
            f"learner.checkpoint.keep: was {settings.keep}; {', '.join(asked)} need an older "
            "checkpoint to go on from: at least 2"
        )


class Killer:
    """Follows a run by its record of trained steps, and injects faults as planned."""

    def __init__(
        self,
        config: RunConfig,
        counts: Mapping[FaultKind, int],
        arguments: argparse.Namespace,
        console: Console,
    ) -> None:
        self._run = config.run.path
        self._max_steps = config.run.max_steps
        self._save_every = config.learner.checkpoint.every
        self._counts = counts
        self._seed: int = arguments.seed
        self._random_numbers = random.Random(arguments.seed)
        self._stall_timeout_s: float = arguments.stall_timeout
        self._progress = Progress(config, self._stall_timeout_s)
        self._console = console
        self._not_refused: tuple[str, ...] = ()
        self.injected: list[Fault] = []

    @property
    def wrong(self) -> tuple[str, ...]:
        """A sentence for each thing that was not in order while the run was under way."""
        self._progress.steps.read()
        return (*self._not_refused, *self._progress.steps.faults)

    async def run(self, children: Sequence[Child]) -> None:
        """Carry the plan out, then end the run."""
        by_role = {child.role: child for child in children}
        for fault in plan(self._seed, self._counts, self._max_steps, tuple(by_role)):
            await self._progress.until_step(fault.step)
            await asyncio.sleep(fault.delay_s)
            await self._inject(fault, by_role[fault.role])
        # Steps that show that the run has recovered from the last fault.
        await self._progress.until_step(max(self._max_steps, self._progress.reached + 2))
        await end(by_role[LEARNER], self._progress, self._stall_timeout_s)

    async def _inject(self, fault: Fault, child: Child) -> None:
        await self._until_checkpoints(fault.kind.num_checkpoints)
        match fault.kind:
            case FaultKind.KILL:
                what = await self._kill(child)
            case FaultKind.RESUME:
                what = await self._resume_from_an_older_checkpoint(child)
            case FaultKind.DAMAGE:
                damage = partial(damage_newest, self._run, self._random_numbers)
                what = await self._killed_after(child, damage)
            case FaultKind.FULL_DISK:
                what = await self._fill_disk(child)
            case FaultKind.REMOVAL:
                what = await self._killed_after(child, partial(remove_newest, self._run))
            case FaultKind.LOSS:
                what = await self._killed_after(child, partial(remove_all, self._run))
            case FaultKind.FRESH_START:
                what = await self._start_afresh(child)
        self.injected.append(fault)
        self._console.print(f"step {self._progress.step}: {fault.kind} ({fault.role}): {what}")

    async def _resume_from_an_older_checkpoint(self, child: Child) -> str:
        """`--resume` takes the checkpoint once, however often the learner is killed after that."""

        def name_an_older_one() -> str:
            path = older_checkpoint(self._run, self._random_numbers)
            child.restart_command = (*child.command, "--resume", "--set", f"run.resume={path}")
            return f"SIGKILL, and on from {path.name}"

        return await self._killed_after(child, name_an_older_one)

    async def _start_afresh(self, child: Child) -> str:
        """Another learner, as of a person who types the first command again. The one at hand is
        frozen, so that no step and no restart comes before the refusal."""
        process = await self._progress.until_running(child)
        _signal_family(process.pid, signal.SIGSTOP)
        try:
            code, sentence = await refused_start(child.command[1:], self._stall_timeout_s)
        finally:
            _signal_family(process.pid, signal.SIGKILL)
            await process.wait()
        if code != EXIT_CONFIG:
            wrong = f"a start without --resume ended with {code}, not {EXIT_CONFIG}: {sentence}"
            self._not_refused = (*self._not_refused, wrong)
        return f"without --resume: {sentence}; then SIGKILL"

    async def _fill_disk(self, child: Child) -> str:
        """Until a checkpoint was due, or for _DISK_FULL_S: a full disk may hide the steps. The time
        that a learner takes to start does not count: it makes steps before."""
        await self._progress.until_step(self._progress.reached + 1)
        process = await self._progress.until_running(child)
        with full_disk(self._run, process.pid), contextlib.suppress(TimeoutError):
            # Read under the limit: steps made before it may have saved, and a step is on record
            # before it saves.
            self._progress.read()
            async with asyncio.timeout(_DISK_FULL_S):
                await self._progress.until_step(self._progress.reached + self._save_every + 1)
        return "no space for a checkpoint"

    async def _until_checkpoints(self, count: int) -> None:
        """Waits until the learner has saved so many complete ones."""
        while len(complete_checkpoints(self._run)) < count:
            self._progress.read()
            await asyncio.sleep(10 * _POLL_S)

    async def _kill(self, child: Child) -> str:
        process = await self._progress.until_running(child)
        process.kill()
        await process.wait()
        return "SIGKILL"

    async def _killed_after(self, child: Child, change: Callable[[], str]) -> str:
        """The learner with its ranks is frozen, then the change is made, then it is killed: none of
        them saves, or removes an old checkpoint, and no next learner starts before the change. The
        next one goes on from the newest checkpoint, unless the change says from which: the one that
        an earlier fault named may be gone. Waits for it to have gone on, since the next fault might
        kill it before it has found what was changed."""
        process = await self._progress.until_running(child)
        checkpoints = checkpoints_of(self._run)
        _signal_family(process.pid, signal.SIGSTOP)
        child.restart_command = (*child.command, "--resume")
        try:
            of_the_killed, what = read_history(checkpoints), change()
        finally:
            _signal_family(process.pid, signal.SIGKILL)
        await process.wait()
        while read_history(checkpoints) == of_the_killed:
            self._progress.read()
            await asyncio.sleep(_POLL_S)
        return what


def _signal_family(pid: int, number: signal.Signals) -> None:
    for one in family_of(pid, process_table()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
