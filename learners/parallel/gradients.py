"""Parameters that are sharded over different meshes, as tensor parallelism leaves them.

Torch's operations on lists of tensors, which the optimizer and the gradient's norm are made of,
take tensors of one mesh at a time.

Invariant: the norm is that of the whole gradient, each element counted once; all ranks call it
together and get the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from learners.parallel.sharding import full


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
