"""The seats of engines: of the generators and of the validator."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamrl.config import RunConfig
from streamrl.config.cluster import HostRole
from streamrl.config.generator import GeneratorSettings
from streamrl.errors import ConfigError
from streamrl.placement.plan import Host
from streamrl.placement.seats.seat import Seat, allowed_for, counted

_PIPELINE = ("pipeline_parallel_size", "pp_size")
_DATA = ("data_parallel_size", "dp_size")


def generator_hosts(config: RunConfig, hosts: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
    """For each generator, the hosts that it may be on.

    Raises:
        ConfigError: `generator.count` and `generators` of the hosts do not agree.
    """
    allowed = allowed_for("generator", hosts)
    named = [(host, host.generators) for host in allowed if host.generators is not None]
    open_hosts = tuple(host for host in allowed if host.generators is None)
    placed = sum(count for _, count in named)
    total = config.generator.count
    if placed < total and not open_hosts:
        raise ConfigError(
            f"generator.count: was {total}, and cluster.hosts have room for {placed}: "
            + ", ".join(f"{host.name} has generators {count}" for host, count in named)
        )
    for host, count in named:
        yield from ((host,),) * count
    yield from (open_hosts,) * max(0, total - placed)


def engine_seat(
    name: str,
    role: HostRole,
    generator: GeneratorSettings,
    hosts: Sequence[Host],
    taken: Sequence[Seat],
) -> Seat:
    """The best place that is left for one engine.

    Raises:
        ConfigError: no host has as many GPUs as it needs.
    """
    kind, _, number = generator.device.partition(":")
    size = devices_per_engine(generator)
    if kind not in ("auto", "cuda") or size == 0:
        return Seat(name, role, _idlest(hosts, taken))
    if number:
        return _pinned(name, role, generator.device, int(number), hosts, taken)
    with_gpus = [host for host in hosts if host.devices]
    fitting = [host for host in with_gpus if len(host.devices) >= size]
    if fitting:
        load = _Load.of(taken)
        host, devices = min(
            ((host, load.best(host, size)) for host in fitting),
            key=lambda choice: load.cost(*choice),
        )
        return Seat(name, role, host, devices)
    if with_gpus:
        raise ConfigError(f"{_size_setting(generator)}: was {size}, and {counted(hosts)}")
    if kind == "cuda" and all(host.is_counted for host in hosts):
        raise ConfigError(
            f"{_setting(role)}.device: was {generator.device!r}, and {counted(hosts)}"
        )
    return Seat(name, role, _idlest(hosts, taken))


def devices_per_engine(generator: GeneratorSettings) -> int:
    """GPUs of one engine on a host that has some; 0 where its server runs elsewhere."""
    if generator.url:
        return 0
    return (
        tensor_parallel_size(generator)
        * pipeline_parallel_size(generator)
        * _product(generator, _DATA)
    )


def tensor_parallel_size(generator: GeneratorSettings) -> int:
    """Into how many parts an engine divides each matrix."""
    match generator.engine:
        case "vllm":
            return generator.vllm.tensor_parallel_size
        case "sglang":
            return generator.sglang.tp_size
        case _:
            return 1


def pipeline_parallel_size(generator: GeneratorSettings) -> int:
    """Into how many parts an engine divides its layers."""
    return _product(generator, _PIPELINE)


def _product(generator: GeneratorSettings, names: Sequence[str]) -> int:
    """Of these keywords of the engine, where they are set."""
    sizes = (generator.engine_kwargs.get(name) for name in names)
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


@dataclass(frozen=True)
class _Load:
    """Who has which GPU already, by the host's name and the position."""

    engines: Counter[tuple[str, int]]
    learners: Counter[tuple[str, int]]

    @classmethod
    def of(cls, taken: Sequence[Seat]) -> "_Load":
        def count(is_learner: bool) -> Counter[tuple[str, int]]:
            return Counter(
                (seat.host.name, device)
                for seat in taken
                if (seat.role == "learner") is is_learner
                for device in seat.devices
            )

        return cls(count(False), count(True))

    def best(self, host: Host, size: int) -> tuple[int, ...]:
        """The positions of `size` GPUs of the host with the least load."""
        order = sorted(range(len(host.devices)), key=lambda i: (*self._of(host, i), i))
        return tuple(sorted(order[:size]))

    def cost(self, host: Host, devices: Sequence[int]) -> tuple[int, int]:
        """First with how many learner ranks, then with how many engines a GPU is shared."""
        loads = [self._of(host, device) for device in devices]
        return max(learners for learners, _ in loads), max(engines for _, engines in loads)

    def _of(self, host: Host, device: int) -> tuple[int, int]:
        return self.learners[host.name, device], self.engines[host.name, device]


def _pinned(
    name: str,
    role: HostRole,
    device: str,
    number: int,
    hosts: Sequence[Host],
    taken: Sequence[Seat],
) -> Seat:
    fitting = [host for host in hosts if number < len(host.devices) or not host.is_counted]
    if not fitting:
        raise ConfigError(f"{_setting(role)}.device: was {device!r}, and {counted(hosts)}")
    return Seat(name, role, _idlest(fitting, taken), (number,), is_pinned=True)


def _idlest(hosts: Sequence[Host], taken: Sequence[Seat]) -> Host:
    """The host with the fewest processes for its cores."""
    counts = Counter(seat.host.name for seat in taken for _ in range(seat.num_ranks))
    return min(hosts, key=lambda host: (counts[host.name] + 1) / max(1, host.num_cores))


def _setting(role: HostRole) -> str:
    return "generator" if role == "generator" else "validation.generator"


def _size_setting(generator: GeneratorSettings) -> str:
    field = "sglang.tp_size" if generator.engine == "sglang" else "vllm.tensor_parallel_size"
    return f"generator.{field}"
