"""A network over the ranks of a mesh, in the order that its parts need.

    matrices (tensor) -> tokens (sequence) -> recomputed layers -> shards

Invariant: what a network computes does not depend on it. Called by `load_network`, on every rank,
before an optimizer takes the parameters.
"""

import torch

from learners.parallel.activations import checkpoint_layers
from learners.parallel.mesh import Mesh
from learners.parallel.offload import require_gpu
from learners.parallel.sequence import sequence_block
from learners.parallel.sharding import shard
from learners.parallel.tensor import split_matrices
from learners.policy.network import Network
from streamrl.config.learner import LearnerSettings, OffloadSettings


def distribute(
    network: Network, mesh: Mesh | None, settings: LearnerSettings, *, is_reference: bool = False
) -> None:
    """Distribute it in place, as `settings` say; without a mesh, on one rank.

    Raises:
        ConfigError: the model cannot be divided so, or what is to be offloaded is on the CPU
            anyway.
    """
    require_gpu(settings.offload, network.device)
    if mesh is not None:
        split_matrices(network.model, mesh)
        network.sequence_block = sequence_block(network.model, mesh, is_packed=network.is_packed)
    if settings.gradient_checkpointing:
        checkpoint_layers(network, on_host=settings.offload.activations)
    if is_reference:
        network.requires_grad_(False)
    on_host = is_on_host(settings.offload, is_reference)
    shard(network, mesh, getattr(torch, settings.dtype), on_host=on_host)


def is_on_host(offload: OffloadSettings, is_reference: bool) -> bool:
    """Whether the parameters of this network are in the memory of the host."""
    return offload.parameters or (offload.reference and is_reference)
