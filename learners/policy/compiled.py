"""torch.compile of a decoder's layers, one by one, so that a model's depth costs nothing.

Attention over packed trajectories stays as it is: its buckets differ with every micro-batch. What
is compiled are the pieces around it (norms, projections, rotary positions, the MLP), for any number
of tokens.

Invariant: parameters keep their names, and activation checkpointing stays around the layers.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from learners.parallel.sharding import layers
from learners.policy import attention
from learners.policy.network import Network


def compile_layers(network: Network) -> None:
    """In place; the first passes of a run compile, which takes a minute or so."""
    attend: Any = torch.compiler.disable(attention.attend)
    AttentionInterface.register(attention.NAME, attend)
    for layer in layers(network):
        layer.compile(dynamic=True)
