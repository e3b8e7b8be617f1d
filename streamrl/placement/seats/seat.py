"""A process's place, and the sentences for a process that has none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamrl.config.addresses import host_of, is_any, is_loopback
from streamrl.config.cluster import HostRole
from streamrl.errors import ConfigError
from streamrl.placement.plan import Host


@dataclass(frozen=True)
class Seat:
    """One process on one host; `devices` are positions in `Host.devices`.

    `is_pinned` where a setting such as cuda:1 has chosen the device, which the process finds among
    all of its host's.
    """

    name: str
    role: HostRole
    host: Host
    devices: tuple[int, ...] = ()
    num_ranks: int = 1
    is_pinned: bool = False


def allowed_for(role: HostRole, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts with this role.

    Raises:
        ConfigError: no host has it.
    """
    if allowed := tuple(host for host in hosts if role in host.roles):
        return allowed
    raise ConfigError(
        f"cluster.hosts: the run needs a {role}, and {_none_of(hosts)} {role} among its roles: add "
        "it to those of one"
    )


def at_address(
    setting: str, url: str, hosts: Sequence[Host], all_hosts: Sequence[Host]
) -> tuple[Host, ...]:
    """`hosts`, of all hosts those that may have it: first those that have the address of `url`,
    if it names one.

    Raises:
        ConfigError: the run has several hosts, and none of these has the address.
    """
    wanted = host_of(url)
    if not names_a_host(url, all_hosts):
        return tuple(hosts)
    if all(host.address != wanted for host in hosts):
        addresses = ", ".join(host.address for host in hosts)
        raise ConfigError(
            f"{setting}: was {url!r}, which is the address of no host that may have it ("
            f"{addresses}); leave it out, and the plan chooses one"
        )
    return tuple(sorted(hosts, key=lambda host: host.address != wanted))


def names_a_host(url: str, all_hosts: Sequence[Host]) -> bool:
    """Whether the address of `url` says on which of several hosts it is."""
    return len(all_hosts) > 1 and not is_loopback(url) and not is_any(url)


def counted(hosts: Iterable[Host]) -> str:
    """How many GPUs there are, as part of a sentence.

    >>> counted([Host("here", "127.0.0.1")]), counted([Host("a", "a"), Host("b", "b")])
    ('there are 0 GPUs here', 'a has 0 GPUs, b has 0 GPUs')
    """
    hosts = list(hosts)
    if [host.name for host in hosts] == ["here"]:
        return f"there are {_gpus(hosts[0])} here"
    return ", ".join(f"{host.name} has {_gpus(host)}" for host in hosts)


def _gpus(host: Host) -> str:
    if not host.is_counted:
        return "GPUs that are not counted"
    count = len(host.devices)
    return f"{count} GPU{'' if count == 1 else 's'}"


def _none_of(hosts: Sequence[Host]) -> str:
    names = ", ".join(host.name for host in hosts)
    return f"{names} does not have" if len(hosts) == 1 else f"none of {names} has"
