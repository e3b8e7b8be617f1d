"""What a host has, as its agent reports it: release, Python, cores, GPUs, network interface."""

import socket
import sys

from streamrl import __version__
from streamrl.cli.launchers.ssh.frames import Hello, ReportedDevice
from streamrl.placement.hosts import facts_here


def survey(address: str) -> Hello:
    """What this machine reports; `address` is that of the host for the others."""
    facts = facts_here(_resolved(address))
    return Hello(
        release=__version__,
        python=sys.executable,
        num_cores=facts.num_cores,
        devices=tuple(
            ReportedDevice(d.index, d.memory_bytes, d.name, d.visible_as) for d in facts.devices
        ),
        is_counted=facts.is_counted,
        interface=facts.interface,
    )


def _resolved(address: str) -> str:
    """Its IPv4 address; as it is if it has none."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address
