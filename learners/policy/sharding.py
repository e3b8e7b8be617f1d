"""A network's parameters over the ranks of a mesh: each holds a shard, in float32 if it is trained.

A layer's parameters are gathered in the compute dtype before it runs and freed after that; its
gradients are summed over the ranks in float32, not averaged, because a loss has the denominators of
the whole batch. What is `kept_in_float32` stays so in the computation. `learner.offload` and
`checkpoint_layers` change memory and time, and no bit of a result.

Invariant: parameters keep their names; what gathers is called by all ranks in the same order.

`compute_in`, master weights on one rank: the modules of a network hold copies of its float32
parameters in the compute dtype. Each copy's gradient is added to its master's in float32 and freed
as soon as it is complete, so micro-batches accumulate in float32; the copies follow the masters
before a forward pass. Optimizer, checkpoints and weight channel see masters alone. A parameter that
is frozen, and that the dtype holds bit for bit, has none (`narrow_frozen`): that is nearly all of a
bfloat16 model with an adapter.

`split_matrices`, tensor parallelism: each of the ranks along `tensor` has a part of every matrix of
a layer, by the plan that transformers has for the model. The embeddings and the LM head stay whole:
log-probabilities are computed from whole blocks of the vocabulary. The ranks of a tensor block
compute the same hidden states, bit for bit, and so the same gradients of what they all hold.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from learners.parallel.mesh import Mesh
from learners.policy.decoder import decoder_of
from learners.policy.hugging_face import kept_in_float32, without_adapter_layer
from learners.policy.network import Network
from streamrl.config.learner import OffloadSettings
from streamrl.errors import ConfigError
from streamrl.placement.limits import facts_of, require_shared_matrices

_ATTRIBUTE = "streamrl_master"

Held = TypeVar("Held", bound=Tensor)


def compute_in(network: Network, dtype: torch.dtype) -> None:
    """Give the network's modules copies in `dtype`, which forward and backward passes then use."""
    narrow_frozen(network, dtype)
    copies = {parameter: _copy(parameter, dtype) for parameter in _wider(network, dtype)}
    if copies:
        for module in network.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, copies.get(parameter, parameter))
        network.register_forward_pre_hook(lambda *_: _follow(copies.values()))


@torch.no_grad()
def narrow_frozen(network: Network, dtype: torch.dtype) -> None:
    """Cast what is frozen in place: all of a network of which nothing is trained, or what `dtype`
    holds bit for bit, so that what is merged with it and sent stays the same."""
    is_all_frozen = not any(p.requires_grad for p in network.parameters())
    # Not `network.to`: rotary frequencies are buffers, and stay exact as the policy's do.
    for parameter in _wider(network, dtype):
        if parameter.requires_grad:
            continue
        narrow = parameter.data.to(dtype)
        if is_all_frozen or torch.equal(narrow.to(parameter.dtype), parameter.data):
            parameter.data = narrow


def _wider(network: Network, dtype: torch.dtype) -> list[Parameter]:
    """Parameters that are not in `dtype`, but are to compute in it."""
    exact = _exact_parameters(network, dtype)
    return [p for p in network.parameters() if p.dtype != dtype and p not in exact]


def _exact_parameters(network: Network, dtype: torch.dtype) -> set[Parameter]:
    names = kept_in_float32(network.model, dtype)
    named = network.model.named_parameters()
    return {p for name, p in named if without_adapter_layer(name) in names}


def master_of(parameter: Held) -> Held:
    """What the optimizer changes; the parameter itself where it is no copy."""
    master: Held = getattr(parameter, _ATTRIBUTE, parameter)
    return master


@torch.no_grad()
def _follow(copies: Iterable[Parameter]) -> None:
    """Always, because a fused optimizer leaves no trace that it has changed a parameter."""
    for copy in copies:
        copy.copy_(master_of(copy))


def _copy(master: Parameter, dtype: torch.dtype) -> Parameter:
    copy = Parameter(master.detach().to(dtype, copy=True), requires_grad=master.requires_grad)
    setattr(copy, _ATTRIBUTE, master)
    if master.requires_grad:
        copy.register_post_accumulate_grad_hook(_hand_over)
    return copy


def _hand_over(copy: Tensor) -> None:
    """Called by a backward pass when the copy's gradient of this micro-batch is complete."""
    gradient, copy.grad = copy.grad, None
    master: Parameter = getattr(copy, _ATTRIBUTE)
    assert gradient is not None, "the hook runs after it is there"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


def require_gpu(settings: OffloadSettings, device: torch.device) -> None:
    """Raise ConfigError if an option is on and `device` is the CPU: all is there anyway."""
    if settings.chosen and device.type == "cpu":
        raise ConfigError(
            f"learner.offload.{settings.chosen[0]} moves memory from a GPU to the host, and the "
            f"learner runs on {device}: leave it out"
        )


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
    # Not the inputs of a layer: some families' rotary angles are float32, as on one rank.
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = replace(exact, param_dtype=dtype)
    pinned = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    place = pinned if on_host else OffloadPolicy()
    # What is exact comes first, in groups of its own, since a group has one dtype.
    policies = dict.fromkeys(_exact_modules(network, dtype), exact)
    policies |= dict.fromkeys((*layers(network), network), policy)
    for module, mp_policy in policies.items():
        fully_shard(module, mesh=mesh.parameter_mesh, mp_policy=mp_policy, offload_policy=place)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no sum that divides.
            module.set_force_sum_reduction_for_comms(True)


def _exact_modules(network: Network, dtype: torch.dtype) -> Iterator[Module]:
    """The largest modules of which every parameter is kept in float32."""
    exact = _exact_parameters(network, dtype)

    def found(module: Module) -> Iterator[Module]:
        own = list(module.parameters())
        if own and exact.issuperset(own):
            yield module
        elif exact.intersection(own):
            for child in module.children():
                yield from found(child)

    yield from found(network)


def is_sharded(mesh: Mesh, on_host: bool) -> bool:
    """Whether `shard` makes shards: one rank has them only in the memory of the host."""
    return mesh.world_size > 1 or on_host


def sum_gradients(network: Network, is_on: bool) -> None:
    """Whether backward passes from here on sum the gradients over the ranks.

    Without, each rank adds them to a whole gradient of its own, which the next sum includes.
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(is_on)


def end_passes(network: Network) -> None:
    """After passes without gradient, free what was gathered outside the layers.

    It stays gathered for a backward pass, and while it does it stands in the network's parameters
    in place of the shards that have the gradient.
    """
    if isinstance(network, FSDPModule):
        network.reshard()


def layers(network: Network) -> Iterator[torch.nn.Module]:
    """The decoder's layers: what its lists of modules hold."""
    for child in decoder_of(network.model).children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child


def checkpoint_layers(network: Network, every: int = 1, *, on_host: bool = False) -> None:
    """Make every n-th decoder layer, from the first on, keep its input alone, in the memory of the
    host if `on_host`, and compute the rest a second time. It comes before sharding, so that a layer
    is gathered before it is computed again."""
    for layer in islice(layers(network), 0, None, every):
        layer.forward = partial(_checkpointed, layer.forward, on_host)


def _checkpointed(
    forward: Callable[..., torch.Tensor], on_host: bool, *inputs: Any, **options: Any
) -> torch.Tensor:
    keeping = save_on_cpu(pin_memory=True) if on_host else nullcontext()
    with keeping:
        output: torch.Tensor = checkpoint(forward, *inputs, use_reentrant=False, **options)
    return output


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Of a layer or an expert in a module's name; a plan has a star there."""
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_STYLES = frozenset(
    {
        "colwise",
        "rowwise",
        "colwise_gather_output",
        "rowwise_split_input",
        "packed_colwise",
        "moe_tp_experts",
        _PARTIAL_GRADIENT,
    }
)


def split_matrices(model: PreTrainedModel, mesh: Mesh) -> None:
    """Leave this rank its part of each matrix, as a DTensor over the ranks along `tensor`; before
    the parameters are sharded.

    Raises:
        ConfigError: transformers has no plan for the model, or it does not fit so many ranks.
    """
    size = mesh.size("tensor")
    if size == 1:
        return
    plan, axis = require_plan(model, size), mesh.device_mesh["tensor"]
    for name, module in model.named_modules():
        pattern = _NUMBER.sub("*", name)
        chosen = plan.get(pattern)
        if chosen == _PARTIAL_GRADIENT:
            module.forward = partial(
                _with_summed_gradients, module, module.forward, mesh.group("tensor")
            )
            continue
        for own, _ in list(module.named_parameters(recurse=False)):
            if of_parameter := plan.get(f"{pattern}.{own}", chosen):
                style = ALL_PARALLEL_STYLES[of_parameter]
                style.validate_param(module, own, axis, parameter_name=f"{name}.{own}")
                style.shard_param(module, own, axis)
        if chosen:
            ALL_PARALLEL_STYLES[chosen].install_forward(module, axis)


def require_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """How transformers splits each module, by pattern of names; without the vocabulary's matrices.
    Raises ConfigError as `split_matrices` does."""
    name = model.config.model_type
    whole = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in whole]
    plan = {
        pattern: style
        for pattern, style in model.tp_plan.items()
        if not any(fnmatchcase(name, pattern) for name in names)
    }
    if not plan:
        raise ConfigError(
            f"learner.mesh.tensor: was {size}, and transformers has no tensor-parallel plan for "
            f"{name}; set it to 1"
        )
    if others := sorted(set(plan.values()) - _STYLES):
        raise ConfigError(
            f"learner.mesh.tensor: was {size}, and the plan of {name} has {', '.join(others)}, "
            "which the learner does not train; set it to 1"
        )
    require_shared_matrices(facts_of(model.config.get_text_config()), size)
    return plan


def _with_summed_gradients(
    module: torch.nn.Module,
    forward: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    *inputs: Any,
    **options: Any,
) -> torch.Tensor:
    """`forward` of a module that every rank has, on this rank's heads: the gradients of its
    parameters are those of all heads."""
    own = dict(module._parameters)
    summed = {n: p if p is None else _SumOfGradients.apply(p, group) for n, p in own.items()}  # type: ignore[no-untyped-call]
    module._parameters.update(summed)
    try:
        return forward(*inputs, **options)
    finally:
        module._parameters.update(own)


class _SumOfGradients(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
