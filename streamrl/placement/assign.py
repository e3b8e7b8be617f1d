"""The plan of a run: seats, then addresses, then commands.

Invariant: the same configuration, hosts and model give the same plan; nothing is read but the
model's config.json and the headers of its files. A plan that exists can start, as far as settings
and sizes tell.
"""

from collections.abc import Iterator, Sequence

from streamrl.config import RunConfig
from streamrl.findings import CONFIGURATION, Finding
from streamrl.placement.commands import Commands, with_addresses
from streamrl.placement.memory import Fit, ModelShape
from streamrl.placement.plan import Host, Plan, PlannedProcess
from streamrl.placement.seats import seats


def make_plan(config: RunConfig, hosts: Sequence[Host], *, resume: bool = False) -> Plan:
    """Where every process of the run is started, with which devices, and how.

    Args:
        hosts: in the order in which they are filled.
        resume: whether the learner goes on from its newest checkpoint.

    Raises:
        ConfigError: a process has no place, or hosts could not reach each other.
        DoesNotFitError: a process does not fit into the memory of its GPU.
    """
    placed = seats(config, hosts)
    count = sum(seat.role == "generator" for seat in placed)
    if count != config.generator.max_count:
        generator = config.generator.model_copy(update={"count": count})
        config = config.model_copy(update={"generator": generator})
    config = with_addresses(config, placed)
    fit = Fit(config, placed, ModelShape.of(config), ModelShape.of_critic(config))
    fit.require()
    commands = Commands(config, placed, fit, resume)
    processes = tuple(commands.process(seat) for seat in placed)
    return Plan(config, tuple(hosts), processes, (*fit.warnings(), *_idle(hosts, processes)))


def _idle(hosts: Sequence[Host], processes: Sequence[PlannedProcess]) -> Iterator[Finding]:
    """That GPUs are left which nothing uses."""
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
