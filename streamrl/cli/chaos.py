"""`streamrl chaos`: a launch whose daemons are killed at random moments, and what is left of it.

    streamrl chaos configs/quickstart.yaml --seed 1 --kills 20

Runs what `streamrl launch --new` runs, sends SIGKILL to generators, learner and buffer as the seed
says, lets the supervisor start them again, and when the run has ended proves from its folder that
nothing was lost and nothing trained twice (`streamrl.cli.proof`). Exit code 1 names what is wrong.

Invariant: moments are counted in steps reached, so one seed means one plan on any machine.
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
from streamrl.cli.processes import Child
from streamrl.cli.proof import prove
from streamrl.config.arguments import configuration
from streamrl.errors import ConfigError, StreamRLError
from streamrl.run_folder import prepare
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics

_POLL_S = 0.02
_LARGEST_DELAY_S = 0.2
# The rest of the run is for getting over the last kill, and shows that it does.
_LAST_MOMENT = 0.7


@dataclass(frozen=True)
class Kill:
    """Once the run has reached `step`, after `delay_s` more, the process of this role."""

    step: int
    delay_s: float
    role: str


def main(arguments: argparse.Namespace) -> int:
    console = Console(soft_wrap=True)
    if arguments.kills < 1:
        raise ConfigError(f"--kills: was {arguments.kills}; it must be >= 1")
    config = prepare(configuration(arguments).config, resume=False, new=True)
    killer = Killer(config.run.path, config.run.max_steps, arguments, console)
    finished = run_here(config, console, new=True, companion=killer.run)
    proof = prove(config)
    faults = list(proof.faults)
    if not finished:
        faults.insert(0, "the run was stopped before its end")
    kills = [asdict(kill) for kill in killer.done]
    told = {"seed": arguments.seed, "kills": kills, "finding": proof.finding, "faults": faults}
    (config.run.path / "chaos.json").write_text(json.dumps(told, indent=1) + "\n")
    made = f"{len(killer.done)} of {arguments.kills} kills"
    console.print(f"seed {arguments.seed}, {made} before the end: {proof.finding}")
    for fault in faults:
        console.print(f"WRONG: {fault}")
    return 1 if faults else 0


def plan(seed: int, num_kills: int, max_steps: int, roles: Sequence[str]) -> tuple[Kill, ...]:
    """In order of time. Kinds of daemon take turns in a drawn order, so that none is spared."""
    drawn = random.Random(seed)
    moments = sorted(drawn.uniform(0.0, _LAST_MOMENT * max_steps) for _ in range(num_kills))
    kinds: dict[str, list[str]] = {}
    for role in roles:
        kinds.setdefault(role.partition("-")[0], []).append(role)
    victims: list[str] = []
    while len(victims) < num_kills:
        victims += [drawn.choice(kinds[kind]) for kind in drawn.sample(sorted(kinds), len(kinds))]
    return tuple(
        Kill(int(moment), round(drawn.uniform(0.0, _LARGEST_DELAY_S), 3), victim)
        for moment, victim in zip(moments, victims, strict=False)
    )


class Killer:
    """Follows a run by its record of trained steps, and carries the plan out."""

    def __init__(
        self, folder: Path, max_steps: int, arguments: argparse.Namespace, console: Console
    ) -> None:
        self._record = folder / TRAINED_FILE
        self._max_steps = max_steps
        self._seed: int = arguments.seed
        self._num_kills: int = arguments.kills
        self._retry_timeout_s: float = arguments.patience
        self._console = console
        self._reached = 0
        self._seen = (-1, time.monotonic())
        self.done: list[Kill] = []

    async def run(self, children: Sequence[Child]) -> None:
        """The plan, then watching for a hang until cancelled."""
        by_role = {child.role: child for child in children}
        for kill in plan(self._seed, self._num_kills, self._max_steps, tuple(by_role)):
            await self._until_step(kill.step)
            await asyncio.sleep(kill.delay_s)
            await self._kill(kill, by_role[kill.role])
        await self._until_step(self._max_steps + 1)

    async def _until_step(self, step: int) -> None:
        """Polls the record, which other processes write; raises when it stands still."""
        while self._reached < step:
            self._look()
            await asyncio.sleep(_POLL_S)

    async def _kill(self, kill: Kill, child: Child) -> None:
        """Waits for the supervisor to have the victim running, maybe not for long."""
        while child.process is None or child.process.returncode is not None:
            self._look()
            await asyncio.sleep(_POLL_S)
        # The supervisor gives up on a child that crashes again and again; this is no crash of its.
        child.num_restarts = 0
        child.process.kill()
        await child.process.wait()
        self.done.append(kill)
        self._console.print(f"step {max(0, self._seen[0])}: SIGKILL to {kill.role}")

    def _look(self) -> None:
        lines = read_metrics(self._record)
        step = lines[-1]["step"] if lines else 0
        self._reached = max(self._reached, step)
        if step != self._seen[0]:
            self._seen = (step, time.monotonic())
        elif time.monotonic() - self._seen[1] > self._retry_timeout_s:
            raise StreamRLError(
                f"the run hangs: no step for {self._retry_timeout_s:g} s since step {step}, after "
                f"{len(self.done)} kills (see {self._record.parent / 'logs'})"
            )
