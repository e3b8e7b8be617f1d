"""A network's parameters over the ranks of a mesh: each holds a shard, in float32.

A layer's parameters are gathered in the compute dtype before it runs and freed after that; its
gradients are summed over the ranks in float32. Summed, not averaged, because a loss has the
denominators of the whole batch.

Invariant: parameters keep their names; what gathers is called by all ranks in the same order.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from learners.parallel.mesh import Mesh
from learners.policy.decoding import decoder_of
from learners.policy.master_weights import compute_in
from learners.policy.network import Network


def shard(
    network: Network, mesh: Mesh | None, dtype: torch.dtype, *, on_host: bool = False
) -> None:
    """Shard the network in place: each decoder layer on its own, the rest together.

    `dtype` is that of the computation. One rank keeps the network whole, with master weights where
    `dtype` is not theirs: on a CPU a step costs a fifth less than with shards that nobody shares.
    The parameters must be the same on all ranks. With `on_host` the shards and their gradients are
    in the host's memory, where the optimizer works on them; a layer is copied to the GPU as it is
    gathered.
    """
    if mesh is None or not is_sharded(mesh, on_host):
        compute_in(network, dtype)
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    pinned = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    place = pinned if on_host else OffloadPolicy()
    for module in (*layers(network), network):
        fully_shard(module, mesh=mesh.parameter_mesh, mp_policy=policy, offload_policy=place)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no sum that divides.
            module.set_force_sum_reduction_for_comms(True)


def is_sharded(mesh: Mesh, on_host: bool) -> bool:
    """Whether `shard` makes shards: one rank has them only in the memory of the host."""
    return mesh.world_size > 1 or on_host


def sum_gradients(network: Network, is_on: bool) -> None:
    """Whether backward passes from here on sum the gradients over the ranks.

    Without, each rank adds them to a whole gradient of its own, which the next sum includes.
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(is_on)


def has_shards(network: Network) -> bool:
    """Whether its parameters are gathered for each pass."""
    return isinstance(network, FSDPModule)


def end_passes(network: Network) -> None:
    """After passes without gradient, free what was gathered outside the layers.

    It stays gathered for a backward pass, and while it does it stands in the network's parameters
    in place of the shards that have the gradient.
    """
    if isinstance(network, FSDPModule):
        network.reshard()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded, without gradient; all ranks call it together.

    Where a rank holds all of it already, that is the tensor itself and no copy.
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


def described(tensor: torch.Tensor) -> torch.Tensor:
    """The shape and dtype of the whole, on the device `meta`; no other rank is needed."""
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


def layers(network: Network) -> Iterator[torch.nn.Module]:
    """The decoder's layers: what its lists of modules hold."""
    for child in decoder_of(network.model).children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
