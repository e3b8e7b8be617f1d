"""Activation checkpointing: a decoder layer keeps its input and computes the rest a second time.

Invariant: the gradients are the same bits; only memory and time change. The wrapping is inside
the layer's hooks, so a layer that is sharded is gathered before it is computed again. Called by
`load_network`, before sharding.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from learners.parallel.sharding import layers
from learners.policy.network import Network


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
