"""`streamrl chaos`: a launch whose daemons are killed at random steps, and the audit of its run.

    streamrl chaos configs/quickstart.yaml --seed 1 --kills 20

Runs what `streamrl launch --new` runs and sends SIGKILL to generators, learner and buffer as the
seed says; the supervisor restarts them. When the run has ended, it is audited as by `streamrl
buffer audit`. Exit code 1 if anything is not in order.

Invariant: kills are planned in steps, so one seed means one plan on any machine.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from streamrl.cli.launch import run_here
from streamrl.cli.processes.child import Child
from streamrl.cli.verification.run_audit import audit_run
from streamrl.config import RunConfig
from streamrl.config.arguments import configuration
from streamrl.errors import ConfigError, StreamRLError
from streamrl.run_folder import prepare
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics

_POLL_S = 0.02
_LARGEST_DELAY_S = 0.2
# The rest of the run shows that it recovers from the last kill.
_LAST_KILL = 0.7


@dataclass(frozen=True)
class Kill:
    """Of the process of this role, `delay_s` after the run has reached `step`."""

    step: int
    delay_s: float
    role: str


def main(arguments: argparse.Namespace) -> int:
    console = Console(soft_wrap=True)
    if arguments.kills < 1:
        raise ConfigError(f"--kills: was {arguments.kills}; it must be >= 1")
    config = prepare(
        _with_restarts(configuration(arguments).config, arguments.kills), resume=False, new=True
    )
    killer = Killer(config.run.path, config.run.max_steps, arguments, console)
    run_here(config, console, new=True, background=killer.run)
    audit = audit_run(config.run.path, complete=config)
    faults = list(audit.faults)
    kills = [asdict(kill) for kill in killer.kills]
    record = {"seed": arguments.seed, "kills": kills, "findings": audit.findings, "faults": faults}
    (config.run.path / "chaos.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"seed {arguments.seed}, {len(kills)} of {arguments.kills} kills before the end")
    for line in (*audit.findings, *(f"WRONG: {fault}" for fault in faults)):
        console.print(line)
    return 1 if faults else 0


def _with_restarts(config: RunConfig, num_kills: int) -> RunConfig:
    """The configuration with a restart for each kill in the budget of every process."""
    run = config.run.model_copy(update={"max_restarts": config.run.max_restarts + num_kills})
    return config.model_copy(update={"run": run})


def plan(seed: int, num_kills: int, max_steps: int, roles: Sequence[str]) -> tuple[Kill, ...]:
    """In order of time. Kinds of daemon take turns in a random order, so that none is spared."""
    random_numbers = random.Random(seed)
    steps = sorted(random_numbers.uniform(0.0, _LAST_KILL * max_steps) for _ in range(num_kills))
    kinds: dict[str, list[str]] = {}
    for role in roles:
        kinds.setdefault(role.partition("-")[0], []).append(role)
    victims: list[str] = []
    while len(victims) < num_kills:
        turn = random_numbers.sample(sorted(kinds), len(kinds))
        victims += [random_numbers.choice(kinds[kind]) for kind in turn]
    return tuple(
        Kill(int(step), round(random_numbers.uniform(0.0, _LARGEST_DELAY_S), 3), victim)
        for step, victim in zip(steps, victims, strict=False)
    )


class Killer:
    """Follows a run by its record of trained steps, and kills as planned."""

    def __init__(
        self, folder: Path, max_steps: int, arguments: argparse.Namespace, console: Console
    ) -> None:
        self._record = folder / TRAINED_FILE
        self._max_steps = max_steps
        self._seed: int = arguments.seed
        self._num_kills: int = arguments.kills
        self._stall_timeout_s: float = arguments.stall_timeout
        self._console = console
        self._reached = 0
        self._last_progress = (-1, time.monotonic())
        self.kills: list[Kill] = []

    async def run(self, children: Sequence[Child]) -> None:
        """Carry the plan out, then watch for a stall until cancelled."""
        by_role = {child.role: child for child in children}
        for kill in plan(self._seed, self._num_kills, self._max_steps, tuple(by_role)):
            await self._until_step(kill.step)
            await asyncio.sleep(kill.delay_s)
            await self._kill(kill, by_role[kill.role])
        await self._until_step(self._max_steps + 1)

    async def _until_step(self, step: int) -> None:
        """Waits for the run to reach the step; polls its record, which another process writes."""
        while self._reached < step:
            self._read_progress()
            await asyncio.sleep(_POLL_S)

    async def _kill(self, kill: Kill, child: Child) -> None:
        """Waits for the supervisor to have started the process."""
        while child.process is None or child.process.returncode is not None:
            self._read_progress()
            await asyncio.sleep(_POLL_S)
        child.process.kill()
        await child.process.wait()
        self.kills.append(kill)
        self._console.print(f"step {max(0, self._last_progress[0])}: SIGKILL to {kill.role}")

    def _read_progress(self) -> None:
        """Raises StreamRLError if there has been no step for the stall timeout."""
        lines = read_metrics(self._record)
        step = lines[-1]["step"] if lines else 0
        self._reached = max(self._reached, step)
        if step != self._last_progress[0]:
            self._last_progress = (step, time.monotonic())
        elif time.monotonic() - self._last_progress[1] > self._stall_timeout_s:
            raise StreamRLError(
                f"the run hangs: no step for {self._stall_timeout_s:g} s since step {step}, after "
                f"{len(self.kills)} kills (see {self._record.parent / 'logs'})"
            )
