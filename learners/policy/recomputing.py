"""Activations that are computed again in the backward pass instead of kept.

Transformers' own switch needs `model.train()`, which would also turn dropout on; here the layers
that it marks are wrapped, in whatever mode they are.
Called by: policy.py, when `learner.gradient_checkpointing` is set.
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.errors import ConfigError


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only what enters each decoder layer.

    Raises:
        ConfigError: the model's code marks no layers.
    """
    marked: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not marked:
        raise ConfigError(
            "learner.gradient_checkpointing: the code of this model marks no layers that can be "
            "computed again"
        )
    for layer in marked:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
