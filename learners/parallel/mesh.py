"""The ranks of a learner as a mesh: replicate x shard x sequence x tensor, the last one innermost.

Ranks that differ in `replicate` or `shard` train different trajectories. Those of one block of
sequence x tensor ranks share theirs: along `sequence` each has a stretch of the tokens, along
`tensor` a part of every matrix.

Invariant: the mesh is the same on every rank and does not change; a learner without torchrun is a
world of one with the same groups. The daemon makes it once, before the models.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl.config.learner import MeshSettings

Dimension: TypeAlias = Literal["replicate", "shard", "sequence", "tensor"]

_SHARD_SEQUENCE = "shard_sequence"


@dataclass(frozen=True, eq=False)
class Mesh:
    """Every rank's place; `device` is that of this rank."""

    device_mesh: DeviceMesh
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return int(self.device_mesh.mesh.numel())

    @property
    def num_data(self) -> int:
        """Into how many shares a batch is divided."""
        return self.size("replicate") * self.size("shard")

    @cached_property
    def parameter_mesh(self) -> DeviceMesh:
        """Over which parameters are sharded, for `fully_shard`: [shard x sequence], or [replicate,
        shard x sequence] where there are replicas."""
        self.device_mesh["shard", "sequence"]._flatten(_SHARD_SEQUENCE)
        if self.size("replicate") == 1:
            return self.device_mesh[_SHARD_SEQUENCE]
        return self.device_mesh["replicate", _SHARD_SEQUENCE]

    def size(self, dimension: Dimension) -> int:
        return self.device_mesh[dimension].size()

    def index(self, dimension: Dimension) -> int:
        """This rank's place along the dimension."""
        return self.device_mesh[dimension].get_local_rank()

    def group(self, dimension: Dimension) -> dist.ProcessGroup:
        """The ranks that differ from this one along the dimension only, and this one."""
        return self.device_mesh.get_group(dimension)


def make_mesh(settings: MeshSettings, device: torch.device) -> Mesh:
    """Join the process group, unless this process already has, and make the mesh of its ranks.

    Args:
        device: a GPU without an index is the one of this rank's place on its machine.

    Raises:
        ConfigError: the sizes do not multiply to the number of ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = settings.sizes(dist.get_world_size() if dist.is_initialized() else world_size)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join(world_size, device)
    return Mesh(init_device_mesh(device.type, sizes, mesh_dim_names=tuple(_DIMENSIONS)), device)


def _join(world_size: int, device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world_size == 1:
        # Nobody else has to find it, so it needs no address.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(backend)


_DIMENSIONS: tuple[Dimension, ...] = ("replicate", "shard", "sequence", "tensor")
