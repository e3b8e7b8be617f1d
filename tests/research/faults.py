"""What `tests.research.chaos` does to a run, as planned from a seed.

    kill         SIGKILL to one daemon
    resume       SIGKILL to the learner, and on from an older checkpoint, as `run.resume` says
    damage       SIGKILL to the learner, and a file of its newest checkpoint is damaged
    full-disk    for some steps the learner cannot write files as large as its checkpoints'
    removal      SIGKILL to the learner, and its newest checkpoint is removed
    loss         SIGKILL to the learner, and all of its checkpoints are removed
    fresh-start  a learner is started without `--resume` while the one at hand is frozen, and has to
                 be refused; then SIGKILL to that one, which goes on

A full disk is RLIMIT_FSIZE of the running process, which needs no privilege: a write beyond the
limit fails as one on a full disk does. Invariant: a plan is in steps, so one seed means one plan on
any machine; a plan of kills alone does not depend on the other kinds.
"""

import asyncio
import contextlib
import os
import random
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from streamrl.checkpoints.find import (
    Checkpoint,
    checkpoints_of,
    list_checkpoints,
    read_checkpoint,
    version_of,
)
from streamrl.checkpoints.history import read_history
from streamrl.cli.processes.command import executable
from streamrl.errors import DamagedCheckpointError

LEARNER = "learner"
_LARGEST_DELAY_S = 0.2
# The rest of the run shows that it recovers from the last fault.
_LAST_FAULT = 0.7


class FaultKind(StrEnum):
    KILL = "kill"
    RESUME = "resume"
    DAMAGE = "damage"
    FULL_DISK = "full-disk"
    REMOVAL = "removal"
    LOSS = "loss"
    FRESH_START = "fresh-start"

    @property
    def option(self) -> str:
        """Of the command line: how many of them."""
        return "--losses" if self is FaultKind.LOSS else f"--{self}s"

    @property
    def num_checkpoints(self) -> int:
        """How many complete ones have to be there."""
        match self:
            case FaultKind.KILL | FaultKind.FRESH_START:
                return 0
            case FaultKind.FULL_DISK | FaultKind.LOSS:
                return 1
            case _:
                return 2


@dataclass(frozen=True)
class Fault:
    """To the process of this role, `delay_s` after the run has reached `step`."""

    step: int
    delay_s: float
    role: str
    kind: FaultKind = FaultKind.KILL


def plan(
    seed: int, counts: Mapping[FaultKind, int], max_steps: int, roles: Sequence[str]
) -> tuple[Fault, ...]:
    """In order of time."""
    random_numbers = random.Random(seed)
    num_kills = counts.get(FaultKind.KILL, 0)
    steps = sorted(random_numbers.uniform(0.0, _LAST_FAULT * max_steps) for _ in range(num_kills))
    kills = [
        Fault(int(step), round(random_numbers.uniform(0.0, _LARGEST_DELAY_S), 3), victim)
        for step, victim in zip(steps, victims(random_numbers, num_kills, roles), strict=True)
    ]
    others = [
        Fault(int(random_numbers.uniform(0.2, _LAST_FAULT) * max_steps), 0.0, LEARNER, kind)
        for kind in FaultKind
        if kind is not FaultKind.KILL
        for _ in range(counts.get(kind, 0))
    ]
    return tuple(sorted([*kills, *others], key=lambda fault: fault.step))


def victims(random_numbers: random.Random, count: int, roles: Sequence[str]) -> tuple[str, ...]:
    """Roles, of which kinds of daemon take turns in a random order, so that none is spared."""
    kinds: dict[str, list[str]] = {}
    for role in roles:
        kinds.setdefault(role.partition("-")[0], []).append(role)
    chosen: list[str] = []
    while len(chosen) < count:
        turn = random_numbers.sample(sorted(kinds), len(kinds))
        chosen += [random_numbers.choice(kinds[kind]) for kind in turn]
    return tuple(chosen[:count])


def complete_checkpoints(run: Path) -> tuple[Checkpoint, ...]:
    """Oldest first; each of their files is read."""
    found = []
    for path in list_checkpoints(run):
        with contextlib.suppress(DamagedCheckpointError):
            found.append(read_checkpoint(path))
    return tuple(found)


def older_checkpoint(run: Path, random_numbers: random.Random) -> Path:
    """Not the newest, nor, if there is a choice, the one that the run was resumed from before."""
    history = read_history(checkpoints_of(run))
    older = [checkpoint.path for checkpoint in complete_checkpoints(run)[:-1]]
    others = [path for path in older if history is None or str(path) != history.resume]
    return random_numbers.choice(others or older)


def damage_newest(run: Path, random_numbers: random.Random) -> str:
    """Damage a file of the newest complete checkpoint; which one, and how."""
    newest = complete_checkpoints(run)[-1].path
    file = random_numbers.choice(_files(newest))
    how = random_numbers.choice(("missing", "empty", "truncated", "zeroed"))
    match how:
        case "missing":
            file.unlink()
        case "empty":
            os.truncate(file, 0)
        case "truncated":
            os.truncate(file, file.stat().st_size // 2)
        case _:
            file.write_bytes(bytes(file.stat().st_size))
    return f"SIGKILL, and {file.relative_to(run)} is {how}"


def remove_newest(run: Path) -> str:
    """Remove the newest complete checkpoint, and any that is newer."""
    newest = complete_checkpoints(run)[-1].policy_version
    return _remove([path for path in list_checkpoints(run) if version_of(path) >= newest])


def remove_all(run: Path) -> str:
    """Remove every checkpoint, complete or not."""
    return _remove(list_checkpoints(run))


def _remove(checkpoints: Sequence[Path]) -> str:
    for path in checkpoints:
        shutil.rmtree(path)
    return f"SIGKILL, and {', '.join(path.name for path in checkpoints)} removed"


@contextlib.contextmanager
def full_disk(run: Path, pid: int) -> Iterator[None]:
    """No write of the process may make a file as large as the largest of a checkpoint."""
    newest = list_checkpoints(run)[-1]
    limit = max(path.stat().st_size for path in _files(newest)) - 1
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


NOT_ENDED = -1


async def refused_start(arguments: Sequence[str], deadline_s: float) -> tuple[int, str]:
    """Exit code and last line of `streamrl` with these arguments of a learner; NOT_ENDED for one
    that still runs at the deadline."""
    process = await asyncio.create_subprocess_exec(
        *(executable(), *arguments, "--set", "run.resume=never"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await process.communicate()
    except TimeoutError:
        return NOT_ENDED, f"it still runs after {deadline_s:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = said.decode(errors="replace").splitlines()
    return process.returncode or 0, lines[-1] if lines else ""
