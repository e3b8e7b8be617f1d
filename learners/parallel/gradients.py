"""The norm of gradients that are sharded over different meshes, and clipping to it.

Invariant: the norm is that of the whole gradient, each element counted once, on every rank.
"""

import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from learners.parallel.sharding import full


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Those of one mesh together, which torch's operations on lists ask for."""
    meshes = {id(_mesh(p)): _mesh(p) for p in (ordered := list(parameters))}
    return [[p for p in ordered if _mesh(p) is mesh] for mesh in meshes.values()]


def clip(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> float:
    """The norm before clipping to `max_norm`; all ranks call it together."""
