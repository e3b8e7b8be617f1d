"""Assigns each process a seat: a host, and GPUs of that host.

Learner ranks come first, with one GPU each. An engine then takes as many free GPUs of one host as
it needs. Only if no host has that many does it share GPUs, with as few other engines as possible,
and with a learner only if nothing else is left.

Invariant: the same configuration and hosts give the same seats; every process gets one, or the
configuration is refused. A learner's rank has a GPU, or a share of a CPU host. No two ranks share a
GPU, since NCCL refuses that, and ranks of a block that shares tokens or matrices
(`learner.mesh.sequence` x `tensor`) are on one host.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streamrl.config import RunConfig
from streamrl.config.addresses import host_of, is_any, is_loopback
from streamrl.config.generator import GeneratorSettings
from streamrl.config.run import HostRole
from streamrl.errors import ConfigError
from streamrl.placement.plan import Host

DEVICE_SETTINGS: Mapping[HostRole, str] = {
    "learner": "learner.device",
    "generator": "generator.device",
    "validator": "validation.generator.device",
}


@dataclass(frozen=True)
class Seat:
    """One process on one host; `devices` are indices into `Host.devices`.

    `is_pinned`: a setting such as cuda:1 has chosen the device, so the process sees all devices of
    its host.
    """

    name: str
    role: HostRole
    host: Host
    devices: tuple[int, ...] = ()
    num_ranks: int = 1
    is_pinned: bool = False


def allowed_for(role: HostRole, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts with the role. Every launcher has one for each role except the
    validator's."""
    return tuple(host for host in hosts if role in host.roles)


def at_address(
    setting: str, url: str, hosts: Sequence[Host], all_hosts: Sequence[Host]
) -> tuple[Host, ...]:
    """Return the `hosts` that may take a process that listens at `url`: first those with the
    address in `url`, if it names one.

    Raises:
        ConfigError: the run has several hosts, and none of `hosts` has the address.
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
    """Whether the address of `url` identifies one of several hosts."""
    return len(all_hosts) > 1 and not is_loopback(url) and not is_any(url)


def counted(hosts: Iterable[Host]) -> str:
    """Return the number of GPUs of each host, as part of a sentence.

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


def learner_seats(config: RunConfig, hosts: Sequence[Host]) -> tuple[Seat, ...]:
    """Return one seat for each host with ranks; rank 0 is on the first.

    Raises:
        ConfigError: the hosts with the role have too few GPUs, blocks do not fit on one, or rank 0
            is not where `weights.address` says.
    """
    address = config.weights.address
    allowed = allowed_for("learner", hosts)
    found = _seats_of(config, at_address("weights.address", address, allowed, hosts))
    first = found[0].host
    if names_a_host(address, hosts) and first.address != host_of(address):
        raise ConfigError(
            f"weights.address: was {address!r}, and the learner's first rank is on {first.name} "
            f"({first.address}), by its GPUs; leave it out, and the plan chooses the address"
        )
    return found


def _seats_of(config: RunConfig, allowed: Sequence[Host]) -> tuple[Seat, ...]:
    learner = config.learner
    kind, _, number = learner.device.partition(":")
    with_gpus = tuple(host for host in allowed if host.devices)
    if kind == "cuda" and number:
        host = _with_device("learner", learner.device, allowed)[0]
        return (Seat("learner", "learner", host, (int(number),), is_pinned=True),)
    if kind == "cuda" and not with_gpus and all(host.is_counted for host in allowed):
        raise _no_device("learner", learner.device, allowed)
    block = learner.mesh.sequence * learner.mesh.tensor
    learner.require_ranks(learner.num_ranks)
    has_gpus = kind in ("auto", "cuda") and bool(with_gpus)
    if has_gpus:
        _require_room(config, with_gpus, block)
        shares = _fill(learner.num_ranks, block, [len(host.devices) for host in with_gpus])
    else:
        shares = spread(learner.num_ranks, block, len(allowed))
    found: list[Seat] = []
    for host, count in zip(with_gpus if has_gpus else allowed, shares, strict=True):
        name = f"learner-host-{len(found)}" if found else "learner"
        devices = tuple(range(count if has_gpus else 0))
        if count:
            found.append(Seat(name, "learner", host, devices, num_ranks=count))
    return tuple(found)


def _with_device(role: HostRole, device: str, hosts: Sequence[Host]) -> Sequence[Host]:
    """Return the hosts that may have a device such as cuda:1; raise ConfigError if none has."""
    number = int(device.partition(":")[2])
    found = [host for host in hosts if number < len(host.devices) or not host.is_counted]
    if not found:
        raise _no_device(role, device, hosts)
    return found


def _no_device(role: HostRole, device: str, hosts: Sequence[Host]) -> ConfigError:
    return ConfigError(f"{DEVICE_SETTINGS[role]}: was {device!r}, and {counted(hosts)}")


def _require_room(config: RunConfig, hosts: Sequence[Host], block: int) -> None:
    num_ranks = config.learner.num_ranks
    room = sum(len(host.devices) // block * block for host in hosts)
    if room >= num_ranks:
        return
    mesh, blocks = config.learner.mesh, ""
    if block > 1:
        size = f"learner.mesh.sequence {mesh.sequence} x tensor {mesh.tensor}"
        blocks = f", in blocks of {size} on one host"
    raise ConfigError(
        f"learner.num_ranks: was {num_ranks}, and each rank needs a GPU of its own{blocks}: "
        f"{counted(hosts)}; learner.device cpu trains without"
    )


def _fill(num_ranks: int, block: int, rooms: Sequence[int]) -> Sequence[int]:
    """Return the ranks of each host, filling one host before the next."""
    shares: list[int] = []
    for room in rooms:
        shares.append(min(room // block * block, num_ranks - sum(shares)))
    return shares


def spread(num_ranks: int, block: int, num_hosts: int) -> tuple[int, ...]:
    """Return the ranks of each host, as equal as blocks allow, with more on the first hosts."""
    blocks, more = divmod(num_ranks // block, num_hosts)
    return tuple((blocks + (index < more)) * block for index in range(num_hosts))


def _generator_hosts(config: RunConfig, hosts: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
    """Yield for each generator the hosts that may take it; hosts that must take some come first."""
    allowed = allowed_for("generator", hosts)
    named = [host for host in allowed for _ in range(host.generators or 0)]
    yield from ((host,) for host in named)
    open_hosts = tuple(host for host in allowed if host.generators is None)
    yield from (open_hosts,) * max(0, config.generator.max_count - len(named))


def engine_seat(
    name: str,
    role: HostRole,
    generator: GeneratorSettings,
    hosts: Sequence[Host],
    taken: "Taken",
) -> Seat:
    """Return the best remaining place for one engine. Raise ConfigError if no host has as many GPUs
    as it needs."""
    kind, _, number = generator.device.partition(":")
    size = devices_per_engine(generator)
    if kind not in ("auto", "cuda") or size == 0:
        return Seat(name, role, taken.idlest(hosts))
    if number:
        host = taken.idlest(_with_device(role, generator.device, hosts))
        return Seat(name, role, host, (int(number),), is_pinned=True)
    with_gpus = [host for host in hosts if host.devices]
    fitting = [host for host in with_gpus if len(host.devices) >= size]
    if fitting:
        host = min(fitting, key=lambda host: taken.least_loaded(host, size)[0])
        return Seat(name, role, host, taken.least_loaded(host, size)[1])
    if with_gpus:
        raise ConfigError(f"{size_setting(generator)}: was {size}, and {counted(hosts)}")
    if kind == "cuda" and all(host.is_counted for host in hosts):
        raise _no_device(role, generator.device, hosts)
    return Seat(name, role, taken.idlest(hosts))


def size_setting(generator: GeneratorSettings) -> str:
    field = "sglang.tp_size" if generator.engine == "sglang" else "vllm.tensor_parallel_size"
    return f"generator.{field}"


def devices_per_engine(generator: GeneratorSettings) -> int:
    """Return the number of GPUs of an engine, on a host with GPUs; 0 if its server is elsewhere."""
    if generator.url:
        return 0
    return generator.sglang.tp_size if generator.engine == "sglang" else generator.num_ranks


def tensor_parallel_size(generator: GeneratorSettings) -> int:
    """Return the number of parts into which an engine divides each matrix."""
    match generator.engine:
        case "vllm":
            return generator.vllm.tensor_parallel_size
        case "sglang":
            return generator.sglang.tp_size
        case _:
            return 1


def pipeline_parallel_size(generator: GeneratorSettings) -> int:
    """Return the number of parts into which an engine divides its layers."""
    return generator.product_of(("pipeline_parallel_size",))


Load: TypeAlias = tuple[int, int]
"""The load of a GPU: the numbers of learner ranks and engines on it."""


class Taken:
    """The taken seats, and how busy they make each host."""

    def __init__(self, seats: Iterable[Seat]) -> None:
        self.seats: list[Seat] = []
        self._num_ranks: Counter[str] = Counter()
        self._loads: dict[str, Counter[tuple[bool, int]]] = defaultdict(Counter)
        self._least: dict[str, dict[int, tuple[Load, tuple[int, ...]]]] = defaultdict(dict)
        for seat in seats:
            self.add(seat)

    def add(self, seat: Seat) -> None:
        name = seat.host.name
        self.seats.append(seat)
        self._num_ranks[name] += seat.num_ranks
        self._loads[name].update((seat.role == "learner", device) for device in seat.devices)
        self._least.pop(name, None)

    def least_loaded(self, host: Host, size: int) -> tuple[Load, tuple[int, ...]]:
        """Return the largest load and the indices of the host's `size` least loaded GPUs, compared
        by learner ranks first, then by engines."""
        known, load = self._least[host.name], self._loads[host.name]
        if size not in known:
            loads = sorted((load[True, i], load[False, i], i) for i in range(len(host.devices)))
            of_ranks, of_engines, positions = zip(*loads[:size], strict=True)
            known[size] = (max(of_ranks), max(of_engines)), tuple(sorted(positions))
        return known[size]

    def idlest(self, hosts: Sequence[Host]) -> Host:
        """Return the host with the fewest ranks per core."""
        return min(hosts, key=lambda h: (self._num_ranks[h.name] + 1) / max(1, h.num_cores))


def seats(config: RunConfig, hosts: Sequence[Host]) -> tuple[Seat, ...]:
    """Return the seats of all processes, in the order in which they start. Raise ConfigError if one
    has no place."""
    wanted = allowed_for("buffer", hosts)
    if config.buffer.binds_url:
        wanted = at_address("buffer.url", config.buffer.url, wanted, hosts)
    buffer = Seat("buffer", "buffer", wanted[0])
    taken = Taken(learner_seats(config, hosts))
    for index, wanted in enumerate(_generator_hosts(config, hosts)):
        name = f"generator-{index}"
        taken.add(engine_seat(name, "generator", config.generator, wanted, taken))
    if config.is_validated and (wanted := allowed_for("validator", hosts)):
        generator = config.for_validator().generator
        taken.add(engine_seat("validator", "validator", generator, wanted, taken))
    return (buffer, *taken.seats)
