"""The ranks of a learner as a mesh: replicate x shard x sequence x tensor, the last one innermost.

Ranks that differ in `replicate` or `shard` train different trajectories. Those of one block of
sequence x tensor ranks share theirs: along `sequence` each has a stretch of the tokens, along
`tensor` a part of every matrix.

Invariant: the mesh is the same on every rank and does not change; a learner without torchrun is a
world of one with the same groups.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from streamrl.config.learner import MeshSettings

Dimension: TypeAlias = Literal["replicate", "shard", "sequence", "tensor"]

_SHARD_SEQUENCE = "shard_sequence"


@dataclass(frozen=True, eq=False)
class Mesh:
    device_mesh: DeviceMesh
    device: torch.device
    """This rank's device."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return int(self.device_mesh.mesh.numel())

    @property
    def num_data(self) -> int:
        """The number of shares into which a batch is divided."""
        return self.size("replicate") * self.size("shard")

    @cached_property
    def parameter_mesh(self) -> DeviceMesh:
        """Over which parameters are sharded, for `fully_shard`: [shard x sequence], or [replicate,
        shard x sequence] where there are replicas."""
        flat = self.device_mesh["shard", "sequence"]._flatten(_SHARD_SEQUENCE)
        if self.size("replicate") == 1:
            return flat
        return self.device_mesh["replicate", _SHARD_SEQUENCE]

    def size(self, dimension: Dimension) -> int:
        return self.device_mesh[dimension].size()

    def group(self, dimension: Dimension) -> dist.ProcessGroup:
        """This rank and those that differ from it only along the dimension."""
        return self.device_mesh.get_group(dimension)


def make_mesh(settings: MeshSettings, device: torch.device) -> Mesh:
    """Join the process group, unless already done, and make the mesh of its ranks.

    Args:
        device: a GPU without an index means the one of this rank's position on its machine.

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
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if world_size == 1:
            # No other process has to find it, so it needs no address.
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    return Mesh(init_device_mesh(device.type, sizes, mesh_dim_names=get_args(Dimension)), device)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a possibly sharded tensor, without gradient; all ranks call it together.

    If a rank already holds all of it, it is the tensor itself, not a copy.
    """
    tensor = tensor.detach()
    return _by_its_strides(tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def _by_its_strides(tensor: DTensor) -> DTensor:
    """torch 2.11 refuses a matrix that packs several and whose dimension is split once: it reads
    the stride as the order of two splits."""
    strided = [p.dim for p in tensor.placements if isinstance(p, _StridedShard)]
    splits = [p.dim for p in tensor.placements if isinstance(p, Shard | _StridedShard)]
    if not any(splits.count(dim) == 1 for dim in strided):
        return tensor
    order = DTensorSpec.compute_default_shard_order(tensor.placements)
    spec = replace(tensor._spec, shard_order=order, use_strided_shard_as_shard_order=False)
    return DTensor(tensor.to_local(), spec, requires_grad=False)


class OnDemand(Mapping[str, torch.Tensor]):
    """Tensors that are computed when read. If that needs the other ranks, every rank reads all of
    them in the same order."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def described(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor's shape and dtype, on the device `meta`; needs no other rank."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def assign(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, which every rank has, into one that may be sharded."""
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        whole = whole.to(device=target.device, dtype=target.dtype)
        target.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    else:
        target.copy_(whole)
