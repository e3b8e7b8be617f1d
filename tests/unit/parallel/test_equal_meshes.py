"""Ranks that share tokens or matrices make the steps of one rank: two and four real ranks."""

from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.executor.place import data_ranks
from learners.parallel.mesh import Mesh, assign, full, make_mesh
from learners.parallel.ranks import Ranks
from learners.policy.network import Network
from learners.policy.sequence_parallel import sequence_block
from learners.policy.sharding import shard, split_matrices
from learners.trainer import Trainer
from streamrl.config.learner import MeshSettings
from streamrl.types import GroupHeader
from tests.ranks import run_ranks
from tests.records import with_candidates, with_experts
from tests.tiny_model import VOCAB_SIZE
from tests.training import (
    make_batch,
    make_config,
    make_groups,
    make_network,
    make_trainer,
    observing,
)

CPU = torch.device("cpu")
MAX_TOKENS = 71
ALGORITHMS: dict[str, dict[str, Any]] = {
    "critic": {"advantage": "gae", "kl_loss": {"coef": 0.3}, "kl_reward": {"coef": 0.1}},
    "candidates": {
        "loss": "dppo_kl",
        "proximal": "behavior",
        "loss_config": {"divergence_topk": 4, "clip_ratio_high": 0.02, "clip_ratio_low": 0.02},
        "entropy_coef": 0.1,
    },
    "router replay": {"router_replay": "replay"},
    "echo": {"echo_coef": 0.5, "entropy_coef": 0.1},
    "exact kl": {"loss": "gspo", "kl_loss": {"coef": 0.3, "kind": "full"}, "entropy_coef": 0.1},
}
MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"sequence": 2}, {"tensor": 2}),
    4: ({"sequence": 4}, {"shard": 2, "sequence": 2}, {"sequence": 2, "tensor": 2}),
}


def untrained(name: str, mesh: Mesh | None = None, recompute: bool = False) -> Trainer:
    learner = {"max_tokens_per_micro_batch": MAX_TOKENS, "gradient_checkpointing": recompute}
    # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
    options = {"optimizer": {"eps": 1e-4}, "generator": {"environment": "tools"}}
    config = make_config(algorithm=ALGORITHMS[name], learner=learner, **options)
    return make_trainer(config, mesh, Ranks() if mesh is None else data_ranks(mesh))


def trained(name: str, mesh: Mesh | None = None, recompute: bool = False) -> dict[str, Any]:
    """Parameters of policy and critic, and the metrics, after two steps."""
    trainer = untrained(name, mesh, recompute)
    ranks = Ranks() if mesh is None else data_ranks(mesh)
    metrics = []
    for step in range(2):
        groups = {group.prompt_index: group for group in make_groups(step)}
        if name == "candidates":
            groups = {index: with_candidates(g, 9, 4) for index, g in groups.items()}
        if name == "echo":
            groups = {index: observing(g) for index, g in groups.items()}
        if name == "router replay":
            groups = {index: with_experts(g) for index, g in groups.items()}
        headers = [GroupHeader.of(group) for group in groups.values()]
        mine = [groups[h.prompt_index] for h in share(headers, ranks.count, ranks.index)]
        metrics.append(trainer.step(TrainingBatch.shared(headers, mine, step, ranks)))
    critic = trainer.critic.parameters() if trainer.critic else {}
    parameters = {**trainer.policy.parameters(), **{f"c.{n}": p for n, p in critic.items()}}
    whole = {name: full(parameter).clone() for name, parameter in parameters.items()}
    return {"parameters": whole, "metrics": metrics}


def share_tokens(network: Network, mesh: Mesh) -> Network:
    network.sequence_block = sequence_block(network.model, mesh)
    return network


def on_rank(sizes: tuple[dict[str, int], ...]) -> list[dict[str, Any]]:
    """Per mesh; recomputed layers exchange again, so half of the meshes recompute them."""
    meshes = [make_mesh(MeshSettings(**size), CPU) for size in sizes]
    return [
        {
            "trained": {name: trained(name, mesh, "shard" in size) for name in ALGORITHMS},
            "seen": tokens_seen(share_tokens(make_network(), mesh)),
            "saved": saved_bytes(share_tokens(make_network(), mesh)),
            "gradients": {
                name: split_gradients(name, mesh)
                for name in MODELS
                if name not in WITHOUT_PLAN or "tensor" not in size
            },
        }
        for size, mesh in zip(sizes, meshes, strict=True)
    ]


def tokens_seen(network: Network) -> dict[str, list[int]]:
    """Lengths of the token dimension, by kind of layer."""
    layers: Any = network.model.get_decoder().layers
    seen: dict[str, list[int]] = {"embedding": [], "query": [], "mlp": []}
    modules = (network.model.get_input_embeddings(), layers[0].self_attn.q_proj, layers[1].mlp)
    for kind, module in zip(seen, modules, strict=True):
        module.register_forward_hook(
            lambda module, inputs, output, kind=kind: seen[kind].append(inputs[0].shape[1])
        )
    for micro_batch in make_batch().pack(MAX_TOKENS, CPU):
        network(micro_batch)
    return seen


def saved_bytes(network: Network) -> int:
    """Of the activations that a forward pass keeps for its backward pass."""
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    (micro_batch,) = make_batch().pack(10_000, CPU)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(micro_batch)
    assert output.logprobs is not None
    return sum(storages.values())


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "norms of heads": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "sinks and windows": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
    ),
}
WITHOUT_PLAN = ("sinks and windows",)


def split_gradients(name: str, mesh: Mesh | None = None) -> dict[str, torch.Tensor]:
    """Of two passes added up, so that what is summed over ranks is not summed again; with a mesh
    its shards are on the host, and are assigned once."""
    torch.manual_seed(0)
    network = Network(MODELS[name]().train(), temperature=1.0)
    if mesh is not None:
        split_matrices(network.model, mesh)
        shard(share_tokens(network, mesh), mesh, torch.float32, on_host=True)
        for parameter in network.model.parameters():
            assign(parameter, full(parameter).clone())
    for micro_batch in make_batch().pack(200, CPU):
        network(micro_batch).logprobs.square().mean().backward()
    gradients = {n: full(p.grad) for n, p in network.model.named_parameters()}
    # Ranks of other data trained the same here.
    return {n: g / (1 if mesh is None else mesh.num_data) for n, g in gradients.items()}


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.long)],
    ids=["two ranks", "four ranks"],
)
def meshes(request, tmp_path_factory):
    """Each mesh with the results of all its ranks."""
    sizes = MESHES[request.param]
    by_rank = run_ranks(on_rank, request.param, tmp_path_factory.mktemp("ranks"), sizes)
    return list(zip(sizes, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps_end_where_those_of_one_rank_end(meshes, name):
    alone = trained(name)
    start = untrained(name).policy.parameters()
    assert max((alone["parameters"][n] - p).abs().max() for n, p in start.items()) > 1e-4
    for size, ranks in meshes:
        for rank in ranks:
            together = rank["trained"][name]
            assert together["parameters"].keys() == alone["parameters"].keys()
            for parameter, expected in alone["parameters"].items():
                gap = (together["parameters"][parameter] - expected).abs().max()
                assert gap < 1e-5, (size, parameter, gap)
            for theirs, ours in zip(together["metrics"], alone["metrics"], strict=True):
                for metric, value in ours.items():
                    if metric.startswith(("actor/", "critic/", "mismatch/", "reward/")):
                        assert theirs[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric


def test_layers_see_their_share_of_the_tokens(meshes):
    lengths = [m.packing.ends[-1].item() for m in make_batch().pack(MAX_TOKENS, CPU)]
    assert any(length % 2 for length in lengths), "an even batch proves little"
    for size, ranks in meshes:
        for rank in ranks:
            for seen in rank["seen"].values():
                assert seen == [-(-length // size.get("sequence", 1)) for length in lengths]


def test_a_rank_keeps_its_share_of_the_activations(meshes):
    alone = saved_bytes(make_network())
    for size, ranks in meshes:
        for rank in ranks:
            assert rank["saved"] < 1.3 * alone / size.get("sequence", 1)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_what_ranks_split_or_share_are_whole(meshes, name):
    alone = split_gradients(name)
    for size, ranks in meshes:
        for rank in ranks:
            if name not in rank["gradients"]:
                continue
            for parameter, expected in alone.items():
                gap = (rank["gradients"][name][parameter] - expected).abs().max()
                assert gap < 1e-5 * max(1.0, float(expected.abs().max())), (size, parameter, gap)
