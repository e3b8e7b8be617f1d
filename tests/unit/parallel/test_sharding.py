"""Sharded parameters compute what whole ones do, whatever the mesh; two and four real ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import Mesh, assign, full, make_mesh
from learners.policy.network import Network
from learners.policy.policy import Policy
from learners.policy.sharding import shard
from streamrl.config.learner import MeshSettings
from tests.model_families import make_model
from tests.ranks import run_ranks
from tests.training import make_groups, make_micro_batch, make_network

CPU = torch.device("cpu")
TWO = ({"shard": 2}, {"replicate": 2}, {"sequence": 2})
FOUR = ({"replicate": 2}, {"shard": 2, "sequence": 2}, {"replicate": 2, "sequence": 2})


def backward(network: Network, groups: slice, num_tokens: int) -> torch.Tensor:
    """The gradient of a share of the batch with the denominator of the whole; its logprobs."""
    share = TrainingBatch.of(make_groups()[groups], policy_version=4)
    (micro_batch,) = share.pack(10_000, CPU)
    logprobs = network(micro_batch).logprobs
    (logprobs.square().sum() / num_tokens).backward()
    return logprobs.detach()


def whole(num_ranks: int) -> dict[str, torch.Tensor]:
    network = make_network()
    num_tokens = TrainingBatch.of(make_groups(), 4).sequences.num_tokens
    for rank in range(num_ranks):
        backward(network, slice(rank, None, num_ranks), num_tokens)
    return {name: p.grad for name, p in network.model.named_parameters()}


def on_rank(meshes: tuple[dict[str, int], ...]) -> list[dict[str, Any]]:
    return [on_mesh(make_mesh(MeshSettings(**sizes), CPU)) for sizes in meshes]


def on_mesh(mesh: Mesh) -> dict[str, Any]:
    network = make_network()
    shard(network, mesh, torch.float32)
    policy = Policy(network)
    num_tokens = TrainingBatch.of(make_groups(), 4).sequences.num_tokens
    logprobs = backward(network, slice(mesh.rank, None, mesh.world_size), num_tokens)
    parameters = policy.parameters()
    before = {name: full(parameter).clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        assign(parameter, before[name] + 1)
    return {
        "place": (mesh.num_data, mesh.device_mesh["sequence"].get_local_rank()),
        "block": dist.get_process_group_ranks(mesh.group("sequence")),
        "logprobs": logprobs,
        "held": sum(p.to_local().numel() for p in parameters.values()),
        "gradients": {name: full(p.grad) for name, p in parameters.items()},
        "before": before,
        "after": {name: full(parameter) for name, parameter in parameters.items()},
        "narrow": in_bfloat16(mesh, num_tokens),
    }


def in_bfloat16(mesh: Mesh, num_tokens: int) -> dict[str, torch.Tensor]:
    """The gradients of two equal micro-batches that compute in it."""
    network = make_network()
    shard(network, mesh, torch.bfloat16)
    for _ in range(2):
        backward(network, slice(mesh.rank, None, mesh.world_size), num_tokens)
    return {name: full(p.grad) for name, p in Policy(network).parameters().items()}


@pytest.fixture(scope="module", params=[TWO, FOUR], ids=["two ranks", "four ranks"])
def results(request, tmp_path_factory):
    """Per mesh the results of all ranks."""
    num_ranks = 2 if request.param is TWO else 4
    folder = tmp_path_factory.mktemp("ranks")
    by_rank = run_ranks(on_rank, num_ranks, folder, request.param)
    return num_ranks, request.param, list(zip(*by_rank, strict=True))


def test_gradients_are_the_sum_over_all_ranks(results):
    num_ranks, _, meshes = results
    expected = whole(num_ranks)
    for ranks in meshes:
        for rank in ranks:
            assert rank["gradients"].keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-5, atol=1e-6)


def test_shards_that_compute_in_bfloat16_accumulate_in_float32(results):
    num_ranks, _, meshes = results
    expected = whole(num_ranks)
    for ranks in meshes:
        for rank in ranks:
            for name, gradient in expected.items():
                found = rank["narrow"][name]
                assert found.dtype == torch.float32
                assert (found - 2 * gradient).norm() < 0.1 * (2 * gradient).norm(), name
                assert not torch.equal(found, found.bfloat16().float()), name


def routed(mesh: Mesh | None) -> torch.Tensor:
    """Log-probabilities of a model whose gates and rotary angles are float32 in any dtype."""
    network = Network(make_model("ERNIE 4.5-MoE"), temperature=1.0)
    shard(network, mesh, torch.bfloat16)
    return network(make_micro_batch((9, 5, 12))).logprobs.detach()


def routed_on_rank() -> torch.Tensor:
    return routed(make_mesh(MeshSettings(), CPU))


def test_shards_keep_in_float32_what_a_whole_network_does(tmp_path):
    expected = routed(None)
    for found in run_ranks(routed_on_rank, 2, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_parameters_are_gathered_whole_and_assigned_in_shards(results):
    _, _, meshes = results
    expected = dict(make_network().model.named_parameters())
    for ranks in meshes:
        for rank in ranks:
            assert rank["before"].keys() == expected.keys()
            for name, parameter in expected.items():
                assert torch.equal(rank["before"][name], parameter)
                assert torch.equal(rank["after"][name], parameter + 1)


def test_a_rank_holds_its_shard_alone(results):
    num_ranks, sizes, meshes = results
    total = sum(p.numel() for p in make_network().model.parameters())
    for settings, ranks in zip(sizes, meshes, strict=True):
        assert {rank["held"] for rank in ranks} == {
            total * settings.get("replicate", 1) // num_ranks
        }


def test_a_sequence_block_has_one_share_of_the_batch(results):
    num_ranks, sizes, meshes = results
    for settings, ranks in zip(sizes, meshes, strict=True):
        block = settings.get("sequence", 1)
        for i, rank in enumerate(ranks):
            assert rank["place"] == (num_ranks // block, i % block)
            assert rank["block"] == list(range(i - i % block, i - i % block + block))


def test_a_world_of_one_has_groups_and_no_shards():
    mesh = make_mesh(MeshSettings(), CPU)
    network = make_network()
    try:
        shard(network, mesh, torch.float32)
        assert (mesh.rank, mesh.world_size, mesh.num_data) == (0, 1, 1)
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.group("shard"))
        assert total == 1
    finally:
        dist.destroy_process_group()
    assert all(type(p) is torch.nn.Parameter for p in network.parameters())
