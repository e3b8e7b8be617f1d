"""`--hosts`: the short form of `cluster.hosts`.

    [user@]host[:devices],...      --hosts alice@10.0.0.1:8,10.0.0.2:8,spot-3:0

Invariant: a host that is given so is the host that the settings would describe; nothing else about
it can be said here.
"""

import argparse
import json
from copy import copy

from streamrl.errors import ConfigError


def with_hosts(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with `--hosts` as a `--set cluster.hosts=...`, where it is given.

    Raises:
        ConfigError: a part of it is no host.
    """
    if not getattr(arguments, "hosts", None):
        return arguments
    hosts = [_host(part.strip()) for part in arguments.hosts.split(",")]
    changed = copy(arguments)
    changed.overrides = [*arguments.overrides, f"cluster.hosts={json.dumps(hosts)}"]
    return changed


def _host(part: str) -> dict[str, str | int]:
    """Settings of one host.

    >>> _host("alice@10.0.0.1:8")
    {'name': '10.0.0.1', 'ssh': 'alice@10.0.0.1', 'devices': 8}
    """
    place, colon, devices = part.partition(":")
    name = place.rpartition("@")[2]
    if not name or (colon and not devices.isdecimal()):
        raise ConfigError(
            f"--hosts: was {part!r}; a host is [user@]host[:devices], such as alice@10.0.0.1:8; "
            "for ports of ssh and for IPv6 use cluster.hosts or ~/.ssh/config"
        )
    return {"name": name, "ssh": place, **({"devices": int(devices)} if colon else {})}
