"""Faults of a soak: whom they strike, when, and how a daemon is frozen.

Invariant: a plan is a function of its seed, and spares no kind of daemon.
"""

import asyncio
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.cli.processes.fork_server import ForkedProcess
from tests.research.faults import victims

_FIRST_FAULT, _LAST_FAULT = 0.05, 0.85
_LONGEST_FREEZE_S = 30.0


@dataclass(frozen=True)
class Fault:
    """Of the process of this role, so long after the start; frozen for `freeze_s`, or killed if
    that is 0."""

    at_s: float
    role: str
    freeze_s: float = 0.0


def plan(seed: int, seconds: float, num_faults: int, roles: Sequence[str]) -> tuple[Fault, ...]:
    """In order of time; about half of them freeze a daemon, the others kill it."""
    random_numbers = random.Random(seed)
    times = sorted(
        random_numbers.uniform(_FIRST_FAULT * seconds, _LAST_FAULT * seconds)
        for _ in range(num_faults)
    )
    longest_s = min(_LONGEST_FREEZE_S, seconds / 10)
    return tuple(
        Fault(at_s, role, random_numbers.choice((0.0, random_numbers.uniform(0.2, longest_s))))
        for at_s, role in zip(times, victims(random_numbers, num_faults, roles), strict=True)
    )


async def freeze(process: asyncio.subprocess.Process | ForkedProcess, seconds: float) -> None:
    """Waits so long between SIGSTOP and SIGCONT."""
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
