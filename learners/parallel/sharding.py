"""A network's parameters over the ranks of a mesh: each holds a shard, in float32.

A layer's parameters are gathered in the compute dtype before it runs and freed after that; its
gradients are summed over the ranks in float32. Summed, not averaged, because a loss has the
denominators of the whole batch.

Invariant: parameters keep their names; what gathers is called by all ranks in the same order.

`learner.offload` keeps what a GPU does not need all the time in the memory of the host. Results are
those without; each option moves memory alone.

`checkpoint_layers`: a decoder layer keeps its input and computes the rest a second time. The
gradients are the same bits; only memory and time change. The wrapping is inside the layer's hooks,
so a layer that is sharded is gathered before it is computed again. It comes before sharding.

`by_mesh`: tensor parallelism leaves parameters that are sharded over different meshes. Torch's
operations on lists of tensors, which the optimizer and the gradient's norm are made of, take
tensors of one mesh at a time. The norm is that of the whole gradient, each element counted once;
all ranks call it together and get the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
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
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from learners.parallel.mesh import Mesh
from learners.policy.decoding import decoder_of
from learners.policy.master_weights import compute_in
from learners.policy.network import Network
from streamrl.config.learner import OffloadSettings
from streamrl.errors import ConfigError


def require_gpu(settings: OffloadSettings, device: torch.device) -> None:
    """Refuse to offload what is in the host's memory anyway.

    Raises:
        ConfigError: an option is on and `device` is the CPU.
    """
    if settings.chosen and device.type == "cpu":
        raise ConfigError(
            f"learner.offload.{settings.chosen[0]} moves memory from a GPU to the host, and the "
            f"learner runs on {device}: leave it out"
        )


def keep_state_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Its state is beside its parameters during a step, and in the host's memory otherwise."""
    optimizer.register_step_pre_hook(lambda *_: _move(optimizer, to_host=False))
    optimizer.register_step_post_hook(lambda *_: _move(optimizer, to_host=True))


def _move(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    """The moments; the count of steps is one number and stays where the optimizer put it."""
    for parameter, state in optimizer.state.items():
        device = torch.device("cpu") if to_host else parameter.device
        moments = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and t.ndim}
        state.update({name: moment.to(device) for name, moment in moments.items()})


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


def checkpoint_layers(network: Network, *, on_host: bool = False) -> None:
    """Make each decoder layer keep its input alone, in the memory of the host if `on_host`."""
    for layer in layers(network):
        layer.forward = partial(_checkpointed, layer.forward, on_host)


def _checkpointed(
    forward: Callable[..., torch.Tensor], on_host: bool, *inputs: Any, **options: Any
) -> torch.Tensor:
    keeping = save_on_cpu(pin_memory=True) if on_host else nullcontext()
    with keeping:
        output: torch.Tensor = checkpoint(forward, *inputs, use_reentrant=False, **options)
    return output


def by_mesh(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Those of one mesh together, in their order."""
    ordered = list(parameters)
    meshes = dict.fromkeys(_mesh(p) for p in ordered)
    return [[p for p in ordered if _mesh(p) == mesh] for mesh in meshes]


def split_by_mesh(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, each of one mesh."""
    return [{**group, "params": one} for group in groups for one in by_mesh(group["params"])]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Parameter], max_norm: float | None) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; the norm before."""
    parts = by_mesh(p for p in parameters if p.grad is not None)
    norms = [full(get_total_norm([p.grad for p in part if p.grad is not None])) for part in parts]
    total = norms[0] if len(norms) == 1 else torch.stack([torch.zeros(()), *norms]).norm()
    if max_norm is not None:
        for part in parts:
            clip_grads_with_norm_(part, max_norm, total)
    return float(total)


def _mesh(parameter: Parameter) -> Any:
    """None for a tensor that is not sharded."""
    return getattr(parameter, "device_mesh", None)
