"""Ranks whose trajectories need different numbers of calls wait for each other in none."""

import torch
import torch.distributed as dist

from learners.parallel.mesh import full, make_mesh
from learners.policy.network import Network
from learners.policy.sharding import shard
from streamrl.config.learner import MeshSettings
from tests.model_families import make_model
from tests.ranks import run_ranks
from tests.training import make_micro_batch

LENGTHS = ((40, 20, 9, 3, 1), (6, 7, 8))


def backward(network: Network, lengths: tuple[int, ...]) -> None:
    logprobs = network(make_micro_batch(lengths)).logprobs
    logprobs.sum().backward()


def gradients() -> dict[str, torch.Tensor]:
    network = Network(make_model("LFM2"), temperature=1.0)
    mesh = make_mesh(MeshSettings(), torch.device("cpu"))
    shard(network, mesh, torch.float32)
    backward(network, LENGTHS[dist.get_rank()])
    return {name: full(p.grad) for name, p in network.named_parameters()}


def test_the_gradient_of_an_unpacked_model_is_the_sum_over_all_ranks(tmp_path):
    whole = Network(make_model("LFM2"), temperature=1.0)
    for lengths in LENGTHS:
        backward(whole, lengths)
    for rank in run_ranks(gradients, 2, tmp_path):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-4, atol=1e-3)
