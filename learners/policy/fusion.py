"""Fewer passes over memory in a decoder's layers: compiled, or with the kernels of liger-kernel.

Layers are compiled one by one, so that a model's depth costs nothing, for any number of tokens.
Attention over packed trajectories stays as it is, since its buckets differ with every micro-batch;
so does a model that carries a state from token to token, whose loops would be compiled anew for
each length. What recomputes, offloads or shards a layer is around what is compiled: torch compiles
no part of a layer that is recomputed inside. Liger's kernels are for runs too short to compile.

Invariant: log-probabilities and gradients are those of the plain layers, but for rounding;
parameters keep their names.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import isfunction
from typing import Any

import torch
from transformers import AttentionInterface

from learners.policy import attention
from learners.policy.decoder import carries_state
from learners.policy.network import Network
from learners.policy.sharding import layers
from streamrl.config import RunConfig
from streamrl.extras import is_installed
from streamrl.placement.hosts import has_compiler
from streamrl.placement.limits import require_compilable, require_liger, why_without_liger

_STEPS_TO_COMPILE_FOR = 300


def fuse_layers(network: Network, config: RunConfig) -> None:
    """In place, as `learner.compile` and `learner.liger_layers` say; before it is distributed.

    Raises:
        ConfigError: one of them is true, and this network cannot have it.
    """
    if compiles(network, config):
        compile_layers(network)
    elif uses_liger(network, config):
        use_liger(network)


def compiles(network: Network, config: RunConfig) -> bool:
    """What `learner.compile` comes to for this network; ConfigError if it is true and cannot be."""
    wanted = config.learner.compile
    is_unrolled = wanted is not False and carries_state(network.model)
    if wanted is True:
        require_compilable(network.model.config.model_type, has_state=is_unrolled)
    if wanted != "auto":
        return wanted
    is_worth_it = network.device.type == "cuda" and config.run.max_steps >= _STEPS_TO_COMPILE_FOR
    is_free = not config.algorithm.records_experts and config.learner.liger_layers is not True
    return is_worth_it and is_free and not is_unrolled and has_compiler()


def compile_layers(network: Network) -> None:
    """In place, before anything is put around the layers; the first passes of a run compile, which
    takes a minute or so."""
    attend: Any = torch.compiler.disable(attention.attend)
    AttentionInterface.register(attention.NAME, attend)
    for layer in layers(network):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def uses_liger(network: Network, config: RunConfig) -> bool:
    """What `learner.liger_layers` comes to for this network, if it is not compiled; ConfigError if
    it is true and cannot be."""
    wanted = config.learner.liger_layers
    reason = None if wanted is False else _without_liger(network, config)
    if wanted is True:
        require_liger(reason)
    return wanted is not False and reason is None


def _without_liger(network: Network, config: RunConfig) -> str | None:
    """Why this network's layers stay plain; None if they need not."""
    if network.device.type != "cuda":
        return f"learner.device is {network.device}, not a GPU"
    if not is_installed("liger_kernel"):
        return "liger-kernel is not installed: pip install 'streamrl[liger]'"
    return why_without_liger(network.model.config.model_type, config.learner.mesh.tensor)


def use_liger(network: Network) -> None:
    """In place. The family's classes stay plain, for models that are made later; what its code
    looks up by name, rotary positions, is fused on a GPU alone."""
    modeling = vars(sys.modules[type(network.model).__module__])
    plain = dict(modeling)
    liger = import_module("liger_kernel.transformers.monkey_patch")
    liger._apply_liger_kernel_to_instance(
        network.model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    for name, own in plain.items():
        if (fused := modeling[name]) is not own:
            modeling[name] = _on_a_gpu(fused, own) if isfunction(own) else own


def _on_a_gpu(fused: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def chosen(query: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        return (fused if query.is_cuda else plain)(query, *inputs, **options)

    return chosen
