"""`cluster`: the hosts of a run and their devices, from which `streamrl.placement` makes the plan.

Invariant: the same configuration gives the same plan; nothing is asked of a machine but where a
setting says `auto`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from streamrl.config.section import NotNegative, Positive, Seconds, Section
from streamrl.types.ranges import ID_PATTERN

HostRole: TypeAlias = Literal["buffer", "learner", "generator", "validator"]
_ROLES: tuple[HostRole, ...] = ("buffer", "learner", "generator", "validator")


class HostSettings(Section):
    """One machine of the run."""

    name: Annotated[str, Field(pattern=ID_PATTERN)]
    """Its name in the plan, in logs and in errors."""
    address: str = ""
    """Name or IP address at which the other hosts reach it; empty: `name`."""
    devices: NotNegative | tuple[NotNegative, ...] | Literal["auto"] = "auto"
    """Its GPUs: how many, or their indices; auto: those that the machine reports."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of each GPU; null: what the machine reports, or not checked."""
    cores: Positive | None = None
    """CPU cores, which its processes share; null: what the machine reports."""
    roles: tuple[HostRole, ...] = _ROLES
    """What may be placed on it."""
    generators: NotNegative | None = None
    """Generators on it; null: its part of `generator.count`."""
    ssh: str = ""
    """Where ssh finds it, [user@]host[:port] or a name of ~/.ssh/config; empty: `address`."""
    interface: str = ""
    """Network interface for weights and ranks (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); empty: the
    one that has `address`."""

    @field_validator("devices")
    @classmethod
    def _has_each_device_once(
        cls, devices: int | tuple[int, ...] | str
    ) -> int | tuple[int, ...] | str:
        if isinstance(devices, tuple) and (twice := _twice(devices)):
            raise ValueError(f"devices: {twice[0]} is named twice")
        return devices

    @property
    def reachable_at(self) -> str:
        return self.address or self.name


class ClusterSettings(Section):
    """The machines of a run; without hosts, this machine and what it has."""

    hosts: tuple[HostSettings, ...] = ()
    """The machines, in the order in which they are filled."""
    on_host_failure: Literal["stop", "continue"] = "continue"
    """When a host fails that has only generators: end the run, or go on with the others. A host
    with the learner or the buffer always ends it."""
    folder: Path = Path(".")
    """Working folder of the run's processes on every host; where it is relative, to the home
    folder of a host reached by ssh."""
    python: str = ""
    """Python of StreamRL on hosts that are reached by ssh; empty: the one at this machine's path if
    the host has it, else the first `python3` of its PATH."""
    silence_s: Annotated[float, Field(ge=10, le=900)] = 120.0
    """How long a host may be cut off from the launching machine before both give up."""
    first_port: Annotated[int, Field(ge=1024, le=65_000)] = 29_600
    """Ports that the plan gives to buffer, weights and ranks are counted from here."""
    start_s: Seconds = 300.0
    """Longest wait until a host has answered and its processes have started."""

    @field_validator("hosts")
    @classmethod
    def _has_each_host_once(cls, hosts: tuple[HostSettings, ...]) -> tuple[HostSettings, ...]:
        if twice := _twice(host.name for host in hosts):
            raise ValueError(f"cluster.hosts: {twice[0]} is named twice")
        return hosts


def _twice(values: Iterable[Hashable]) -> list[Hashable]:
    return [value for value, count in Counter(values).items() if count > 1]
