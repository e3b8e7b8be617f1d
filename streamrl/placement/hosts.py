"""A machine as the host of a plan: what it has, asked on the machine itself.

Called by the command line, and by launchers on each of their machines.
"""

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.addresses import is_loopback, url_host
from streamrl.placement.devices import is_rocm, num_cores, usable_devices
from streamrl.placement.plan import Device, Host

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class HostFacts:
    """What a machine says of itself; see `Host`."""

    devices: tuple[Device, ...] = ()
    num_cores: int = 0
    is_counted: bool = True
    interface: str = ""


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
