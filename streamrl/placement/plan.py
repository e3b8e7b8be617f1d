"""The plan of a run: every process with its host, devices, environment and command.

Invariant: a plan is what a person would type. Each command can be run by hand in the working folder
of its host, with the configuration of the plan in `run.path/config.yaml` there, and the run is the
same. The launchers (of this machine, Ray, Slurm) take the processes from a plan and add nothing
that changes what they compute.

`streamrl.placement.make_plan` makes plans; the launchers of `streamrl.cli` read them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.config import RunConfig
from streamrl.config.run import HostRole
from streamrl.findings import Finding

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class MemoryPart:
    """One part of a process's memory. `is_certain` if shapes and settings determine it; otherwise
    it is a rough estimate."""

    name: str
    num_bytes: int
    is_certain: bool = True


@dataclass(frozen=True)
class Need:
    """The memory that one process needs on one device, at its peak. `remedies` are the settings
    that lower it."""

    parts: tuple[MemoryPart, ...]
    remedies: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[MemoryPart], remedies: Iterable[str] = ()) -> "Need":
        """Return the need made of these parts, without the empty ones."""
        return cls(tuple(part for part in parts if part.num_bytes > 0), tuple(remedies))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def certain_bytes(self) -> int:
        """The sum of the certain parts."""
        return sum(part.num_bytes for part in self.parts if part.is_certain)

    def describe(self) -> str:
        largest = sorted(self.parts, key=lambda part: -part.num_bytes)
        return ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in largest)


def gib(num_bytes: float) -> str:
    """
    >>> gib(80 * 2**30), gib(3 * 2**28), gib(2**20)
    ('80 GiB', '0.75 GiB', '1 MiB')
    """
    if num_bytes < _GIB / 10:
        return f"{num_bytes / _MIB:.3g} MiB"
    return f"{num_bytes / _GIB:.3g} GiB"


@dataclass(frozen=True)
class Device:
    """A GPU of a host, by its index there; `memory_bytes` is 0 if unknown.

    `visible_as` is its name in CUDA_VISIBLE_DEVICES: the index, or the UUID of a GPU or of a part
    of one (MIG).
    """

    index: int
    memory_bytes: int = 0
    name: str = ""
    visible_as: str = ""

    def __post_init__(self) -> None:
        if not self.visible_as:
            object.__setattr__(self, "visible_as", str(self.index))


@dataclass(frozen=True)
class Host:
    """A machine; the others reach it at `address`, through its network interface `interface`.

    `num_cores` is 0 if unknown. `generators` is the number that it must take, None for its share.
    If `is_counted` is false, its GPUs are unknown, and processes choose devices themselves.
    """

    name: str
    address: str
    devices: tuple[Device, ...] = ()
    num_cores: int = 0
    roles: tuple[HostRole, ...] = ("buffer", "learner", "generator", "validator")
    interface: str = ""
    generators: int | None = None
    is_counted: bool = True


_FOR_PERSONS = frozenset({"OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"})


def without_chosen(planned: Mapping[str, str], environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that a plan sets, without those for threads and interfaces that a person
    has already set."""
    chosen = {name for name in _FOR_PERSONS if environment.get(name)}
    return {name: value for name, value in planned.items() if name not in chosen}


@dataclass(frozen=True)
class PlannedProcess:
    """One command on one host.

    `name` is unique: buffer, generator-0, validator, learner (one per host, which starts the ranks
    there; the second host's is learner-host-1). `devices` are indices on the host; `environment` is
    added to the host's; `restart_command` is run after a failure; `memory` is roughly the need on
    each device, None if there is no device or the model is unknown.
    """

    name: str
    role: HostRole
    host: str
    command: tuple[str, ...]
    restart_command: tuple[str, ...]
    devices: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    is_optional: bool = False
    memory: Need | None = None


@dataclass(frozen=True)
class Plan:
    """All processes of a run, in the order in which they start.

    `config` has the plan's addresses and sizes; every process gets it as its file. `notes` are
    warnings for the person who starts the run.
    """

    config: RunConfig
    hosts: tuple[Host, ...]
    processes: tuple[PlannedProcess, ...]
    notes: tuple[Finding, ...] = ()

    @property
    def config_file(self) -> Path:
        """Where every process finds `config`, relative to the working folder of its host."""
        return self.config.run.path / "config.yaml"

    def on(self, host: str) -> Sequence[PlannedProcess]:
        return [process for process in self.processes if process.host == host]
