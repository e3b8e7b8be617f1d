"""The seats of the learner's ranks: a GPU for each, else shares of the CPU hosts.

Invariant: no two ranks have one GPU, since NCCL refuses that, and the ranks of a block that shares
tokens or matrices (`learner.mesh.sequence` x `tensor`) are on one host.
"""

from collections.abc import Callable, Sequence

from streamrl.config import RunConfig
from streamrl.config.addresses import host_of
from streamrl.errors import ConfigError
from streamrl.placement.plan import Host
from streamrl.placement.seats.seat import Seat, allowed_for, at_address, counted, names_a_host

_ADDRESS = "weights.address"


def learner_seats(config: RunConfig, hosts: Sequence[Host]) -> tuple[Seat, ...]:
    """One seat for each host that has ranks; rank 0 is on the first.

    Raises:
        ConfigError: the hosts with the role have too few GPUs, blocks do not fit on one, or rank 0
            is not where `weights.address` says.
    """
    address = config.weights.address
    found = _seats_of(config, at_address(_ADDRESS, address, allowed_for("learner", hosts), hosts))
    first = found[0].host
    if names_a_host(address, hosts) and first.address != host_of(address):
        raise ConfigError(
            f"{_ADDRESS}: was {address!r}, and the learner's first rank is on {first.name} "
            f"({first.address}), by its GPUs; leave it out, and the plan chooses the address"
        )
    return found


def _seats_of(config: RunConfig, allowed: Sequence[Host]) -> tuple[Seat, ...]:
    learner = config.learner
    kind, _, number = learner.device.partition(":")
    with_gpus = tuple(host for host in allowed if host.devices)
    if kind == "cuda" and number:
        return (_pinned(learner.device, int(number), allowed),)
    if kind == "cuda" and not with_gpus and all(host.is_counted for host in allowed):
        raise ConfigError(f"learner.device: was {learner.device!r}, and {counted(allowed)}")
    block = learner.mesh.sequence * learner.mesh.tensor
    learner.require_ranks(learner.num_ranks)
    if kind in ("auto", "cuda") and with_gpus:
        _require_room(config, with_gpus, block)
        shares = _fill(learner.num_ranks, block, [len(host.devices) for host in with_gpus])
        return _seats(with_gpus, shares, lambda count: tuple(range(count)))
    shares = _spread(learner.num_ranks, block, len(allowed))
    return _seats(allowed, shares, lambda _: ())


def _seats(
    hosts: Sequence[Host], shares: Sequence[int], devices: Callable[[int], tuple[int, ...]]
) -> tuple[Seat, ...]:
    used = [(host, count) for host, count in zip(hosts, shares, strict=True) if count]
    return tuple(
        Seat(
            f"learner-host-{index}" if index else "learner",
            "learner",
            host,
            devices(count),
            num_ranks=count,
        )
        for index, (host, count) in enumerate(used)
    )


def _pinned(device: str, number: int, hosts: Sequence[Host]) -> Seat:
    for host in hosts:
        if number < len(host.devices) or not host.is_counted:
            return Seat("learner", "learner", host, (number,), is_pinned=True)
    raise ConfigError(f"learner.device: was {device!r}, and {counted(hosts)}")


def _require_room(config: RunConfig, hosts: Sequence[Host], block: int) -> None:
    num_ranks = config.learner.num_ranks
    room = sum(len(host.devices) // block * block for host in hosts)
    if room >= num_ranks:
        return
    mesh = config.learner.mesh
    blocks = (
        f", in blocks of learner.mesh.sequence {mesh.sequence} x tensor {mesh.tensor} on one host"
        if block > 1
        else ""
    )
    raise ConfigError(
        f"learner.num_ranks: was {num_ranks}, and each rank needs a GPU of its own{blocks}: "
        f"{counted(hosts)}; learner.device cpu trains without"
    )


def _fill(num_ranks: int, block: int, rooms: Sequence[int]) -> tuple[int, ...]:
    """Ranks of each host, one host full before the next."""
    shares: tuple[int, ...] = ()
    for room in rooms:
        shares = (*shares, min(room // block * block, num_ranks - sum(shares)))
    return shares


def _spread(num_ranks: int, block: int, num_hosts: int) -> tuple[int, ...]:
    """Ranks of each host, as equal as blocks allow, the first ones more."""
    blocks, more = divmod(num_ranks // block, num_hosts)
    return tuple((blocks + (index < more)) * block for index in range(num_hosts))
