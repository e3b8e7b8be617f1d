"""Hours of a run with faults, and whether anything in it grows without bound.

    PYTHONPATH=. python -m tests.research.soak configs/quickstart.yaml --minutes 480

Runs what `streamrl launch --new` runs, without an end. Daemons are killed (SIGKILL) and frozen
(SIGSTOP) as the seed says, while memory, descriptors, threads and children of each, the run's
folder, shared memory, the latency of a buffer call and the time of a step are read. At the end the
learner is asked to stop and the run is audited. Exit code 1 if a reading grows
(`tests.research.growth`), the audit finds a fault, or something is left behind: processes, shared
memory, temporary files.

The daemons get a folder of their own for temporary files; its name in their environment also tells
which processes are the run's.
"""

import argparse
import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from buffers.connect import connect, try_stats
from streamrl.cli.arguments import options
from streamrl.cli.buffer.audit import RunAudit
from streamrl.cli.launch import run_here
from streamrl.cli.processes.restarts import Child
from streamrl.cli.processes.run_commands import sole_launch
from streamrl.config import RunConfig
from streamrl.config.loading.load import configuration
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, Interrupted, StreamRLError
from streamrl.run_folder import prepare
from streamrl.service import processes_with
from tests.research import processes
from tests.research.endless import audit as audit_of, end, endless
from tests.research.progress import Progress
from tests.research.script import add_stall_timeout, run_script
from tests.research.soak_faults import Fault, freeze, plan
from tests.research.soak_record import (
    RUN,
    SOAK_FILE,
    WIDTH,
    Row,
    disk_values,
    process_values,
    rows,
    soak_table,
)

_TEMPORARY = "TMPDIR"
_LAUNCHER = "launcher"
_NUM_SAMPLES = 300
_SHORTEST_INTERVAL_S, _LONGEST_INTERVAL_S = 0.25, 5.0
# Steps that show that the run has recovered from the last fault.
_LAST_STEPS = 2
_ENDING_S = 120.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="soak",
        description="run for hours under faults, and see that nothing grows or is left behind",
    )
    options.config(parser)
    parser.add_argument("--minutes", type=float, default=480.0, help="default: 480")
    parser.add_argument(
        "--faults-per-hour",
        type=float,
        default=30.0,
        metavar="N",
        help="daemons killed or frozen; default: 30",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        metavar="SECONDS",
        help="of each process, not judged; default: a third of the minutes",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the times and kinds of faults")
    add_stall_timeout(parser)
    return parser


def main(arguments: argparse.Namespace) -> int:
    _require_usable(arguments)
    processes.require_proc()
    given = configuration(arguments).config
    with sole_launch(given.run.path):
        return _soak(given, arguments, Console(soft_wrap=True))


def _soak(given: RunConfig, arguments: argparse.Namespace, console: Console) -> int:
    config = prepare(endless(given, _num_faults(arguments)), resume=False, new=True)
    temporary = Path(tempfile.mkdtemp(prefix="streamrl-soak-"))
    os.environ[_TEMPORARY] = str(temporary)
    soak = Soak(config, arguments, temporary, console)
    try:
        wrong = _run(config, soak, console)
        left = tuple(left_behind(temporary, soak.shared_memory))
    finally:
        del os.environ[_TEMPORARY]
        shutil.rmtree(temporary, ignore_errors=True)
    audit = audit_of(config)
    table = rows(config.run.path / SOAK_FILE, soak.warm_up_s)
    grown = (f"{row.subject}: {row.reading} grows" for row in table if row.trend.grows)
    faults = (*wrong, *soak.progress.steps.faults, *grown, *audit.faults, *left)
    _write(config, soak, table, audit, faults)
    console.print(soak_table(table), width=WIDTH)
    console.print(f"{len(soak.faults)} faults were injected (seed {arguments.seed})")
    for line in (*audit.findings, *(f"WRONG: {fault}" for fault in faults)):
        console.print(line)
    return 1 if faults else 0


def _num_faults(arguments: argparse.Namespace) -> int:
    count: int = round(arguments.faults_per_hour * arguments.minutes / 60.0)
    return count


def left_behind(temporary: Path, shared_memory: frozenset[str]) -> Iterator[str]:
    """A sentence for each thing of the run that is there after its end. Waits a moment for
    processes that are ending."""
    deadline = time.monotonic() + _ENDING_S
    while pids := processes_with(_TEMPORARY, str(temporary).__eq__):
        if time.monotonic() > deadline:
            break
        time.sleep(_SHORTEST_INTERVAL_S)
    for pid in pids:
        yield f"process {pid} is left: {processes.command_of(pid)}"
    for name in sorted(shared_memory):
        if (processes.SHARED_MEMORY / name).exists():
            yield f"shared memory is left: {processes.SHARED_MEMORY / name}"
    for path in sorted(temporary.rglob("*")):
        if not path.is_dir():
            yield f"a temporary file is left: {path.relative_to(temporary)}"


class Soak:
    """The part of a soak that runs beside the daemons."""

    def __init__(
        self, config: RunConfig, arguments: argparse.Namespace, temporary: Path, console: Console
    ) -> None:
        self._config = config
        self._folder = config.run.path
        self._seconds = 60.0 * arguments.minutes
        self._num_faults = _num_faults(arguments)
        self._seed: int = arguments.seed
        self._temporary = temporary
        self._console = console
        self._stall_timeout_s: float = arguments.stall_timeout
        self.progress = Progress(config, self._stall_timeout_s)
        self._call_ms: float | None = None
        self._last_step = (0, time.monotonic())
        self.warm_up_s = (
            self._seconds / 3 if arguments.warm_up is None else float(arguments.warm_up)
        )
        self.shared_memory: frozenset[str] = frozenset()
        self.faults: list[Fault] = []
        self.crashes: tuple[str, ...] = ()

    async def run(self, children: Sequence[Child]) -> None:
        """Samples and faults from the first step on for as long as asked, some steps more, then the
        learner's end."""
        await self.progress.until_step(1)
        try:
            await self._observe(children)
        except* StreamRLError as errors:
            raise errors.exceptions[0] from None
        await self.progress.until_step(self.progress.step + _LAST_STEPS)
        self.crashes = tuple(self._crashes(children))
        learner = next(child for child in children if child.role == "learner")
        await end(learner, self.progress, self._stall_timeout_s)

    async def _observe(self, children: Sequence[Child]) -> None:
        """Waits until the last fault is over and the time is, too."""
        end = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._sample(children)),
                tasks.create_task(self._time_buffer_calls()),
            ]
            await self._inject(children)
            await asyncio.sleep(end - time.monotonic())
            for task in beside:
                task.cancel()

    def _crashes(self, children: Sequence[Child]) -> Iterator[str]:
        for child in children:
            num_kills = sum(f.role == child.role and not f.freeze_s for f in self.faults)
            if (count := child.num_restarts - num_kills) > 0:
                yield f"{child.role} failed {count} times by itself (see {child.log_file})"

    async def _sample(self, children: Sequence[Child]) -> None:
        """Waits an interval between two samples; ends when cancelled."""
        interval_s = min(
            max(self._seconds / _NUM_SAMPLES, _SHORTEST_INTERVAL_S), _LONGEST_INTERVAL_S
        )
        start = time.monotonic()
        with (self._folder / SOAK_FILE).open("w") as file:
            while True:
                lives = {c.role: c.process.pid for c in children if c.process is not None}
                lives = {**lives, _LAUNCHER: os.getpid()}
                values = await asyncio.to_thread(self._values, lives)
                line = {"time_s": time.monotonic() - start, "lives": lives, "values": values}
                file.write(json.dumps(line) + "\n")
                file.flush()
                self.progress.read()
                await asyncio.sleep(interval_s)

    def _values(self, lives: Mapping[str, int]) -> dict[str, float]:
        table = processes.process_table()
        daemons = frozenset(pid for role, pid in lives.items() if role != _LAUNCHER)
        values: dict[str, float] = {}
        for role, pid in lives.items():
            reading = processes.read_family(pid, table, apart_from=daemons)
            values |= {} if reading is None else process_values(role, reading)
        families = (one for pid in daemons for one in processes.family_of(pid, table))
        names = frozenset[str]().union(*map(processes.shared_memory_of, families))
        self.shared_memory |= names
        return {**values, **disk_values(self._folder), **self._run_values(len(names))}

    def _run_values(self, num_names: int) -> dict[str, float]:
        values: dict[str, float] = {
            f"{RUN}/temporary_files": sum(len(names) for _, _, names in os.walk(self._temporary)),
            f"{RUN}/shared_memory_names": num_names,
        }
        if self._call_ms is not None:
            values = {**values, f"{RUN}/buffer_call_ms": self._call_ms}
        (earlier, since_s), step, now_s = self._last_step, self.progress.step, time.monotonic()
        if step != earlier:
            self._last_step = (step, now_s)
        if 0 < earlier < step:
            values = {**values, f"{RUN}/step_s": (now_s - since_s) / (step - earlier)}
        return values

    async def _time_buffer_calls(self) -> None:
        """Waits for the stats of the buffer, then a moment; ends when cancelled."""
        buffer = connect(self._config)
        try:
            while True:
                start = time.perf_counter()
                stats, _ = await try_stats(buffer)
                self._call_ms = None if stats is None else 1e3 * (time.perf_counter() - start)
                await asyncio.sleep(_SHORTEST_INTERVAL_S)
        finally:
            await buffer.close()

    async def _inject(self, children: Sequence[Child]) -> None:
        """Waits for the time of each fault, and for its daemon to run."""
        start = time.monotonic()
        by_role = {child.role: child for child in children}
        for fault in plan(self._seed, self._seconds, self._num_faults, tuple(by_role)):
            await asyncio.sleep(fault.at_s - (time.monotonic() - start))
            child = by_role[fault.role]
            process = await self.progress.until_running(child)
            self.faults.append(fault)
            if fault.freeze_s:
                self._console.print(f"SIGSTOP to {fault.role} for {fault.freeze_s:.1f} s")
                await freeze(process, fault.freeze_s)
            else:
                self._console.print(f"SIGKILL to {fault.role}")
                process.kill()
                await process.wait()


def _run(config: RunConfig, soak: Soak, console: Console) -> tuple[str, ...]:
    """Everything up to the last daemon's end; a sentence for what kept it from that."""
    try:
        run_here(config, console, new=True, background=soak.run)
    except ConfigError:
        raise
    except StreamRLError as error:
        return (str(error),)
    except Interrupted:
        return ("the soak was stopped before its end",)
    return soak.crashes


def _write(
    config: RunConfig, soak: Soak, table: Sequence[Row], audit: RunAudit, faults: Sequence[str]
) -> None:
    record = {
        "warm_up_s": soak.warm_up_s,
        "injected": [asdict(fault) for fault in soak.faults],
        "rows": [asdict(row) for row in table],
        "findings": audit.findings,
        "faults": faults,
    }
    write_file(config.run.path / "soak.json", json.dumps(record, indent=1) + "\n")


def _require_usable(arguments: argparse.Namespace) -> None:
    for name, least in (("minutes", 0.1), ("faults_per_hour", 0.0), ("warm_up", 0.0)):
        value = getattr(arguments, name)
        if value is not None and not least <= value < math.inf:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: was {value:g}; it must be >= {least:g}, and finite")


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
