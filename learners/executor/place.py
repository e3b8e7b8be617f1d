"""Where a learner rank stands: its mesh, the groups it exchanges data with, its liveness watch.

Invariant: a learner without torchrun opens no socket. It makes a process group of one only if
offloaded parameters need a mesh.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from learners.executor.liveness import Liveness
from learners.parallel.mesh import Mesh, make_mesh
from learners.parallel.ranks import UNBOUNDED, Ranks
from learners.policy.loading import device_of
from streamrl.config.learner import LearnerSettings
from streamrl.errors import ConfigError

_RENDEZVOUS = timedelta(minutes=5)


@dataclass(frozen=True, eq=False)
class RankPlace:
    """`all` are all ranks of the learner, for commands; `data` the ranks that divide the batch."""

    all: Ranks
    data: Ranks
    mesh: Mesh | None
    liveness: Liveness

    def require_same(self, policy_version: int) -> None:
        """Raise ConfigError if the ranks start from other versions."""
        versions = self.all.gather(policy_version)
        if len(set(versions)) > 1:
            raise ConfigError(
                f"run.folder: the ranks of the learner found checkpoints of the versions "
                f"{', '.join(map(str, versions))}; it must be one folder that all of them read"
            )

    def part(self) -> None:
        self.liveness.stop()
        if self.mesh is not None:
            dist.destroy_process_group()


def join(settings: LearnerSettings) -> RankPlace:
    """Join the ranks that torchrun started. Waits until all are there.

    Raises:
        ConfigError: the sizes of `learner.mesh`, or the batch, do not fit so many ranks.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.num_ranks not in (1, num_ranks):
        raise ConfigError(
            f"learner.num_ranks {settings.num_ranks} is for a learner that is started without "
            f"torchrun, which has started {num_ranks}: leave it out"
        )
    settings.require_ranks(num_ranks)
    if num_ranks == 1:
        device = device_of(settings.device)
        if device.type == "cuda" and device.index is not None:
            # For code that names no device: streams, events, random numbers, Triton kernels.
            torch.cuda.set_device(device)
        needs_shards = settings.offload.parameters or settings.offload.reference
        mesh = make_mesh(settings.mesh, device) if needs_shards else None
        return RankPlace(Ranks(), Ranks(), mesh, Liveness())
    if ":" in settings.device:
        raise ConfigError(
            f"learner.device {settings.device} is one device, and the learner has several ranks; "
            "each takes the one of its place on its machine with cuda, or auto"
        )
    mesh = make_mesh(settings.mesh, device_of(settings.device))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=_RENDEZVOUS)
    return RankPlace(
        all=Ranks.of(dist.new_group(backend="gloo", timeout=UNBOUNDED)),
        data=data_ranks(mesh),
        mesh=mesh,
        liveness=Liveness(store, mesh.rank, mesh.world_size, settings.rank_deadline_s),
    )


def data_ranks(mesh: Mesh) -> Ranks:
    """The ranks at this rank's position in their sequence x tensor block; each block trains one
    share of the batch."""
    block = mesh.world_size // mesh.num_data
    groups = [
        dist.new_group(list(range(position, mesh.world_size, block)), backend="gloo")
        for position in range(block)
    ]
    return Ranks.of(groups[mesh.rank % block])
