"""Master weights: float32 parameters behind those that a narrower dtype computes with.

On one rank the modules of a network hold copies of its parameters in the compute dtype. Each copy's
gradient is added to its master's in float32 and freed as soon as it is complete, so micro-batches
accumulate in float32; the copies follow the masters before a forward pass. Shards do the same on
several ranks.

Invariant: optimizer, checkpoints and weight channel see masters alone, under the parameters' names.
"""

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

_ATTRIBUTE = "streamrl_master"

Held = TypeVar("Held", bound=Tensor)


def compute_in(network: Module, dtype: torch.dtype) -> None:
    """Give the network's modules copies in `dtype`, which forward and backward passes then use.

    A network of which nothing is trained is cast itself and has no masters.
    """
    if not any(p.requires_grad for p in network.parameters()):
        # Not `network.to`: rotary frequencies are buffers, and stay exact as the policy's do.
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
    elif any(p.dtype != dtype for p in network.parameters()):
        copies = _replace_parameters(network, dtype)
        network.register_forward_pre_hook(lambda *_: _follow(copies))


def master_of(parameter: Held) -> Held:
    """What the optimizer changes; the parameter itself where it is no copy."""
    master: Held = getattr(parameter, _ATTRIBUTE, parameter)
    return master


@torch.no_grad()
def _follow(copies: list[Parameter]) -> None:
    """Always, because a fused optimizer leaves no trace that it has changed a parameter."""
    for copy in copies:
        copy.copy_(master_of(copy))


def _replace_parameters(network: Module, dtype: torch.dtype) -> list[Parameter]:
    copies: dict[Parameter, Parameter] = {p: _copy(p, dtype) for p in network.parameters()}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, copies[parameter])
    return list(copies.values())


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
