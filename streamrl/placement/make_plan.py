"""Makes the plan of a run: seats, then addresses, then the command and environment of each process.

Invariant: the same configuration, hosts and model give the same plan; only the model's config.json
and the headers of its files are read. As far as settings and sizes tell, a plan can start. A
command is what a person would type in the host's working folder. On several hosts, `buffer.url` and
`weights.address` are addresses of hosts, with ports that are known before anything starts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.config import RunConfig
from streamrl.config.addresses import is_any, is_loopback, places_of, port_of, url_host
from streamrl.config.run import HostRole
from streamrl.errors import ConfigError
from streamrl.findings import CONFIGURATION, Finding
from streamrl.placement.memory import Fit, ModelShape
from streamrl.placement.plan import Host, Plan, PlannedProcess
from streamrl.placement.seats import Seat, seats

_PORTS: dict[HostRole, int] = {"buffer": 0, "learner": 1}
"""The offset from `cluster.first_port` of each role's port."""
_RANKS = 2
"""The offset of the port where ranks on several hosts find each other, on the first one's host."""


def with_addresses(config: RunConfig, seats: Sequence[Seat]) -> RunConfig:
    """Return the configuration with addresses that all seats can use. Raise ConfigError if the
    seats are on several hosts and `buffer.url` names Redis by a loopback address."""
    if len({seat.host.name for seat in seats}) == 1:
        return config
    address = _address(config, config.weights.address, "learner", seats)
    url = config.buffer.url
    if config.buffer.binds_url:
        url = _address(config, url, "buffer", seats)
    elif any(is_loopback(f"redis://{url_host(host)}:0") for host, _ in places_of(url)):
        raise ConfigError(
            f"buffer.url: was {url!r}, which is another machine on each host of the run: name the "
            "one that Redis runs on"
        )
    return config.with_values(weights={"address": address}, buffer={"url": url})


def _address(config: RunConfig, url: str, role: HostRole, seats: Sequence[Seat]) -> str:
    """Return the URL where the role's first process listens; `url` itself if it has no process."""
    if all(seat.role != role for seat in seats):
        return url
    scheme, _, place = url.partition("://")
    host = place.rpartition(":")[0]
    if is_loopback(url) or is_any(url):
        host = url_host(next(seat.host.address for seat in seats if seat.role == role))
    return f"{scheme}://{host}:{port_of(url) or config.cluster.first_port + _PORTS[role]}"


_RENDEZVOUS_S = 900


@dataclass(frozen=True)
class Commands:
    """Makes the processes for the seats of one run."""

    config: RunConfig
    seats: Sequence[Seat]
    fit: Fit
    resume: bool

    def process(self, seat: Seat) -> PlannedProcess:
        command = self._command(seat)
        given = ("--resume",) if seat.role == "learner" and self.resume else ()
        on_restart = ("--resume",) if seat.role == "learner" else ()
        has_gpu = seat.devices and seat.host.is_counted
        return PlannedProcess(
            name=seat.name,
            role=seat.role,
            host=seat.host.name,
            command=(*command, *given),
            restart_command=(*command, *on_restart),
            devices=tuple(seat.host.devices[i].index for i in seat.devices if seat.host.is_counted),
            environment=self._environment(seat),
            num_ranks=seat.num_ranks,
            is_optional=seat.role == "validator" and not self.config.reads_validations,
            memory=self.fit.need(seat) if has_gpu else None,
        )

    def _command(self, seat: Seat) -> tuple[str, ...]:
        ranks = self._torchrun(seat) if seat.role == "learner" else ()
        name = ("--id", seat.name) if seat.role == "generator" else ()
        settings = self.fit.overrides(seat).items()
        overrides = (word for key, value in settings for word in ("--set", f"{key}={value}"))
        file = str(self.config.run.path / "config.yaml")
        return (*ranks, "streamrl", seat.role, "--config", file, *name, *overrides)

    def _torchrun(self, seat: Seat) -> tuple[str, ...]:
        """Return the torchrun part of the command of a learner on several hosts; () on one host.

        Rank 0 has to be where `weights.address` is, so the order of hosts is given: without
        --node-rank, torchrun sorts hosts by their addresses.
        """
        learners = [other for other in self.seats if other.role == "learner"]
        if len(learners) == 1:
            return ()
        return (
            "streamrl",
            "torchrun",
            f"--nnodes={len(learners)}",
            f"--node-rank={learners.index(seat)}",
            f"--nproc-per-node={seat.num_ranks}",
            f"--master-addr={learners[0].host.address}",
            f"--master-port={self.config.cluster.first_port + _RANKS}",
            f"--rdzv-id={self.config.run.name}",
            f"--rdzv-conf=timeout={_RENDEZVOUS_S}",
            "--no-python",
        )

    def _environment(self, seat: Seat) -> Mapping[str, str]:
        if seat.role == "buffer":
            return {}
        host = seat.host
        found: dict[str, str] = {}
        if seat.devices and host.is_counted:
            # The number of a device in a setting counts all of the host's devices.
            shown = range(len(host.devices)) if seat.is_pinned else seat.devices
            visible = ",".join(host.devices[index].visible_as for index in shown)
            found["CUDA_VISIBLE_DEVICES"] = visible
        if host.num_cores:
            # The process's share of the cores; if a learner starts its ranks itself, their sum.
            starts_ranks = seat.role == "learner" and not self._torchrun(seat)
            cores = host.num_cores * (seat.num_ranks if starts_ranks else 1)
            num_sharing = max(1, self._num_sharing[host.name])
            found["OMP_NUM_THREADS"] = str(max(1, cores // num_sharing))
        if host.interface and len(self._num_sharing) > 1:
            found |= {"NCCL_SOCKET_IFNAME": host.interface, "GLOO_SOCKET_IFNAME": host.interface}
        return found

    @cached_property
    def _num_sharing(self) -> Counter[str]:
        """How many ranks share the cores of each host, by name. The buffer does not count, nor does
        a validator that rests between validations."""
        idle = {"buffer"} | ({"validator"} if self.config.validation.rests else set())
        found = Counter({seat.host.name: 0 for seat in self.seats})
        for seat in self.seats:
            found[seat.host.name] += 0 if seat.role in idle else seat.num_ranks
        return found


def make_plan(config: RunConfig, hosts: Sequence[Host], *, resume: bool = False) -> Plan:
    """Plan where every process of the run starts, with which devices, and how.

    Args:
        hosts: in the order in which they are filled.
        resume: whether the learner continues from its newest checkpoint.

    Raises:
        ConfigError: a process has no place, or hosts could not reach each other.
        DoesNotFitError: a process does not fit into the memory of its GPU.
    """
    placed = seats(config, hosts)
    count = sum(seat.role == "generator" for seat in placed)
    if count != config.generator.max_count:
        config = config.with_values(generator={"count": count})
    config = with_addresses(config, placed)
    fit = Fit(config, placed, ModelShape.of(config), ModelShape.of_critic(config))
    fit.require()
    commands = Commands(config, placed, fit, resume)
    processes = tuple(commands.process(seat) for seat in placed)
    return Plan(config, tuple(hosts), processes, (*fit.warnings(), *_unused_gpus(hosts, processes)))


def _unused_gpus(hosts: Sequence[Host], processes: Sequence[PlannedProcess]) -> Iterator[Finding]:
    """Warn of GPUs that nothing uses."""
    used = {(process.host, index) for process in processes for index in process.devices}
    uses_cpu = any(process.role != "buffer" and not process.devices for process in processes)
    for host in hosts:
        left = [d.index for d in host.devices if (host.name, d.index) not in used]
        if left and not uses_cpu:
            where = "here" if host.name == "here" else f"of {host.name}"
            yield CONFIGURATION.warning(
                f"generator.count: nothing uses GPU {', '.join(map(str, left))} {where}; more "
                "generators or learner.num_ranks would"
            )
