"""The hosts of a run: those of `cluster.hosts`, or else this machine with what it has.

Invariant: a machine is asked only where a setting leaves something open, and only this one is asked
here; `ask` answers for others. Called by the command line and the launchers.
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback, url_host
from streamrl.config.cluster import HostSettings
from streamrl.errors import ConfigError
from streamrl.placement.devices import is_rocm, num_cores, usable_devices
from streamrl.placement.plan import Device, Host

_SIOCGIFADDR = 0x8915
_GIB = 2**30
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class HostFacts:
    """What a machine says of itself; see `Host`."""

    devices: tuple[Device, ...] = ()
    num_cores: int = 0
    is_counted: bool = True
    interface: str = ""


Ask: TypeAlias = Callable[[HostSettings], HostFacts]


def hosts_of(config: RunConfig, ask: Ask | None = None) -> tuple[Host, ...]:
    """The hosts of a run, in the order in which they are filled.

    Args:
        ask: what a host of `cluster.hosts` has, where its settings leave that open; by default only
            this machine can be asked.

    Raises:
        ConfigError: a host leaves open what cannot be found out.
    """
    if not config.cluster.hosts:
        return (this_machine(),)
    return tuple(_host(settings, ask or _ask_here) for settings in config.cluster.hosts)


def this_machine() -> Host:
    """The machine that this process runs on, as the only host of a run."""
    facts = facts_here()
    return Host(
        "here",
        "127.0.0.1",
        facts.devices,
        facts.num_cores,
        is_counted=facts.is_counted,
    )


def facts_here(address: str = "") -> HostFacts:
    """What this machine has: GPUs, the cores of this process, the interface with the address."""
    cores = num_cores()
    return HostFacts(usable_devices(), cores, not is_rocm(), interface_of(address))


def is_here(settings: HostSettings) -> bool:
    """Whether the host is this machine, by its name or address."""
    place = settings.reachable_at
    return (
        place in (socket.gethostname(), socket.getfqdn())
        or is_loopback(f"tcp://{url_host(place)}:0")
        or bool(interface_of(place))
    )


def interface_of(address: str) -> str:
    """The network interface that has this address; "" if none has, or for a loopback one."""
    if not address or is_loopback(f"tcp://{url_host(address)}:0"):
        return ""
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _interface_of_ipv6(address: str) -> str:
    try:
        wanted = ipaddress.IPv6Address(address)
        listed = _IPV6_ADDRESSES.read_text().splitlines()
    except (ValueError, OSError):
        return ""
    rows = (line.split() for line in listed)
    return next((row[-1] for row in rows if int(row[0], 16) == int(wanted)), "")


def _host(settings: HostSettings, ask: Ask) -> Host:
    facts = ask(settings) if settings.devices == "auto" or settings.cores is None else HostFacts()
    return Host(
        name=settings.name,
        address=settings.reachable_at,
        devices=_devices(settings, facts),
        num_cores=settings.cores or facts.num_cores,
        roles=settings.roles,
        ssh="" if is_here(settings) and not settings.ssh else settings.ssh or settings.reachable_at,
        interface=settings.interface or facts.interface,
        generators=settings.generators,
        is_counted=settings.devices != "auto" or facts.is_counted,
    )


def _ask_here(settings: HostSettings) -> HostFacts:
    if is_here(settings):
        return facts_here(settings.reachable_at)
    if settings.devices != "auto":
        return HostFacts()
    raise ConfigError(
        f"cluster.hosts: {settings.name} is not this machine, and its devices are auto: say how "
        "many GPUs it has, such as devices: 8 (0 for a machine without)"
    )


def _devices(settings: HostSettings, facts: HostFacts) -> tuple[Device, ...]:
    given = settings.devices
    memory = int((settings.device_memory_gib or 0) * _GIB)
    if given == "auto":
        found = facts.devices
    else:
        known = {device.index: device for device in facts.devices}
        indices = range(given) if isinstance(given, int) else given
        found = tuple(known.get(index, Device(index)) for index in indices)
    return tuple(Device(d.index, memory or d.memory_bytes, d.name, d.visible_as) for d in found)
