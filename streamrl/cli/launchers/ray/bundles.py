"""Makes bundles to request from a Ray cluster from a configuration, and the hosts of a plan from
bundles.

    learner, learner-host-1, ...  the ranks, as many on one node as fit; the first has the buffer
    generator-0, ...              each engine for itself, with a GPU for each part of it
    validator                     as a generator

Invariant: a bundle is a host of the plan, with exactly the GPUs that Ray gives it, so the same
configuration and cluster give the same plan. Nothing here imports Ray.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.config.run import HostRole
from streamrl.placement.plan import Device, Host
from streamrl.placement.seats import devices_per_engine, spread

# Assumed of the nodes that a cluster without nodes may start.
_GPUS_PER_NODE = 8
_BUFFER = 1
"""The number of cores for the buffer daemon."""


class Room(NamedTuple):
    gpus: int
    cpus: int

    def __str__(self) -> str:
        """
        >>> str(Room(1, 4)), str(Room(0, 1))
        ('1 GPU and 4 CPUs', '1 CPU')
        """
        counts = [(self.gpus, "GPU")] if self.gpus else []
        counts.append((self.cpus, "CPU"))
        return " and ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts)


@dataclass(frozen=True)
class Bundle:
    """The resources that one host of the plan needs on one node."""

    name: str
    roles: tuple[HostRole, ...]
    needs: Room

    @property
    def resources(self) -> Mapping[str, float]:
        """The needs in the form that a placement group takes."""
        gpus = {"GPU": float(self.needs.gpus)} if self.needs.gpus else {}
        return {"CPU": float(self.needs.cpus), **gpus}


def learner_bundles(config: RunConfig, rooms: Sequence[Room]) -> tuple[Bundle, ...]:
    """One bundle for each node that has ranks. They are needed all at once."""
    learner = config.learner
    learner.require_ranks(learner.num_ranks)
    block = learner.mesh.sequence * learner.mesh.tensor
    has_gpus = _has_gpus(learner.device, rooms)
    if has_gpus:
        room = max((room.gpus for room in rooms), default=0) or _GPUS_PER_NODE
    else:
        room = max((room.cpus for room in rooms), default=0) - _BUFFER
    num_nodes = math.ceil(learner.num_ranks // block / max(1, room // block))
    ranks = spread(learner.num_ranks, block, num_nodes)
    return tuple(
        Bundle(
            f"learner-host-{index}" if index else "learner",
            ("learner",) if index else ("buffer", "learner"),
            Room(count if has_gpus else 0, count + (0 if index else _BUFFER)),
        )
        for index, count in enumerate(ranks)
    )


def engine_bundles(config: RunConfig, rooms: Sequence[Room]) -> Iterator[Bundle]:
    """One bundle for each generator and for the validator; each may come and go by itself."""
    for index in range(config.generator.max_count):
        name = f"generator-{index}"
        yield Bundle(name, ("generator",), _engine_room(config.generator, rooms))
    if config.is_validated:
        needs = _engine_room(config.for_validator().generator, rooms)
        yield Bundle("validator", ("validator",), needs)


def host_of(bundle: Bundle, found: Mapping[str, Any]) -> Host:
    """The host of the plan for a bundle; `found` is its supervisor's answer, {} before it is
    there."""
    count = bundle.needs.gpus
    return Host(
        bundle.name,
        found.get("address", bundle.name),
        tuple(Device(*device) for device in found.get("devices", ()))
        or tuple(Device(index) for index in range(count)),
        found.get("num_cores", 0),
        bundle.roles,
        interface=found.get("interface", ""),
        generators=1 if "generator" in bundle.roles else None,
    )


def missing(bundles: Sequence[Bundle], rooms: Sequence[Room]) -> str:
    """Why nodes with these resources have no room for the bundles, as part of a sentence."""
    for bundle in bundles:
        if not any(r.gpus >= bundle.needs.gpus and r.cpus >= bundle.needs.cpus for r in rooms):
            largest = max(rooms, default=Room(0, 0))
            return f"{bundle.name} needs {bundle.needs} of one node, and the largest has {largest}"
    needed = Room(
        sum(bundle.needs.gpus for bundle in bundles), sum(bundle.needs.cpus for bundle in bundles)
    )
    total = Room(sum(room.gpus for room in rooms), sum(room.cpus for room in rooms))
    if total.gpus < needed.gpus or total.cpus < needed.cpus:
        return f"{bundles[0].name} needs {needed} in all, and the cluster has {total}"
    return f"{bundles[0].name} needs {needed}, which the cluster has, and others use"


def _engine_room(generator: GeneratorSettings, rooms: Sequence[Room]) -> Room:
    count = devices_per_engine(generator)
    return Room(count if count and _has_gpus(generator.device, rooms) else 0, 1)


def _has_gpus(device: str, rooms: Sequence[Room]) -> bool:
    """Whether a process with this device setting gets GPUs on such nodes."""
    kind = device.partition(":")[0]
    return kind == "cuda" or (kind == "auto" and any(room.gpus for room in rooms))
