"""Tensor parallelism: each of the ranks along `tensor` has a part of every matrix of a layer.

What is split how is the plan that transformers has for the model. The embeddings and the LM head
stay whole: log-probabilities are computed from whole blocks of the vocabulary.

Invariant: the ranks of a tensor block compute the same hidden states, bit for bit, and so the same
gradients of what they all hold. Called before the parameters are sharded.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from learners.parallel.mesh import Mesh
from streamrl.errors import ConfigError
from streamrl.placement.limits import facts_of, require_shared_matrices

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
    """Leave this rank its part of each matrix, as a DTensor over the ranks along `tensor`.

    Raises:
        ConfigError: transformers has no plan for the model, or it does not fit so many ranks.
    """
    size = mesh.size("tensor")
    if size == 1:
        return
    plan = require_plan(model, size)
    shared = [name for name, style in plan.items() if style == _PARTIAL_GRADIENT]
    split = {name: style for name, style in plan.items() if name not in shared}
    apply_tensor_parallelism(model, mesh.device_mesh["tensor"], split)
    for name, module in model.named_modules():
        if any(fnmatchcase(name, pattern) for pattern in shared):
            module.forward = partial(
                _with_summed_gradients, module, module.forward, mesh.group("tensor")
            )


def require_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """How transformers splits each module, by pattern of names; without the vocabulary's matrices.

    Raises:
        ConfigError: as `split_matrices`.
    """
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
