"""Fused decoder layers: by torch.compile, or with the kernels of liger-kernel.

Layers are compiled one by one, so that a model's depth does not matter, for any number of tokens.
Attention over packed trajectories is not compiled, since its buckets differ with every micro-batch;
nor are models that carry a state from token to token, whose loops would be compiled again for each
length. Recomputing, offloading and sharding wrap the compiled layer, since torch does not compile a
layer with recomputed parts inside. Liger's kernels are for runs too short to compile.

Invariant: log-probabilities and gradients are those of the plain layers, up to rounding; parameters
keep their names.
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
    """Fuse layers in place, as `learner.compile` and `learner.liger_layers` say; before the network
    is distributed.

    Raises:
        ConfigError: one of them is true but not possible for this network.
    """
    if compiles(network, config):
        compile_layers(network)
    elif uses_liger(network, config):
        use_liger(network)


def compiles(network: Network, config: RunConfig) -> bool:
    """Whether to compile this network, by `learner.compile`; ConfigError if it is true but not
    possible."""
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
    """Compile the layers in place, before anything wraps them; the first passes of a run then take
    a minute or so to compile."""
    attend: Any = torch.compiler.disable(attention.attend)
    AttentionInterface.register(attention.NAME, attend)
    for layer in layers(network):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def uses_liger(network: Network, config: RunConfig) -> bool:
    """Whether to use Liger's kernels, by `learner.liger_layers`, if the network is not compiled;
    ConfigError if it is true but not possible."""
    wanted = config.learner.liger_layers
    reason = None if wanted is False else _without_liger(network, config)
    if wanted is True:
        require_liger(reason)
    return wanted is not False and reason is None


def _without_liger(network: Network, config: RunConfig) -> str | None:
    """Why this network cannot use Liger's kernels; None if it can."""
    if network.device.type != "cuda":
        return f"learner.device is {network.device}, not a GPU"
    if not is_installed("liger_kernel"):
        return "liger-kernel is not installed: pip install 'streamrl[liger]'"
    return why_without_liger(network.model.config.model_type, config.learner.mesh.tensor)


def use_liger(network: Network) -> None:
    """Use Liger's kernels in place. The family's classes stay plain for models made later; what its
    code looks up by name (rotary positions) is fused only on a GPU."""
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
