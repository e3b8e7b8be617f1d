"""Ranks that share the tokens of a micro-batch compute what one rank does: 2 and 4 real ranks."""

from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from learners.parallel.mesh import Mesh, make_mesh
from learners.parallel.sequence import require_shareable, sequence_block
from learners.parallel.sharding import full_parameters, shard
from learners.policy.critic import Critic
from learners.policy.network import Network
from learners.policy.policy import Policy
from learners.trainer import Trainer
from streamrl.config.learner import MeshSettings
from streamrl.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import make_batch, make_config, make_network

CPU = torch.device("cpu")
MAX_TOKENS = 71
ALGORITHMS: tuple[dict[str, Any], ...] = (
    {"advantage": "gae", "kl_loss": {"coef": 0.3}, "kl_reward": {"coef": 0.1}, "entropy_coef": 0.1},
    {"loss": "gspo", "kl_loss": {"coef": 0.3, "kind": "full"}},
)


def spread(network: Network, mesh: Mesh | None) -> Network:
    if mesh is not None:
        share_tokens(network, mesh)
        shard(network, mesh, torch.float32)
    return network


def share_tokens(network: Network, mesh: Mesh) -> Network:
    network.sequence_block = sequence_block(network.model, mesh)
    return network


def trained(algorithm: dict[str, Any], mesh: Mesh | None = None) -> dict[str, Any]:
    """Parameters of policy and critic, and the metrics, after three steps."""
    config = make_config(
        algorithm=algorithm,
        learner={"max_tokens_per_micro_batch": MAX_TOKENS},
        optimizer={"max_grad_norm": None, "eps": 1e-3},
    )
    torch.manual_seed(0)
    critic = None
    if config.algorithm.needs_values:
        critic = Critic(config, spread(make_network(has_values=True), mesh))
    reference = Policy(spread(make_network(seed=1), mesh))
    policy = Policy(spread(make_network(), mesh))
    trainer = Trainer(config, policy, reference, critic)
    metrics = [trainer.step(make_batch(seed)) for seed in range(3)]
    found = {name: p.detach().clone() for name, p in full_parameters(policy.parameters())}
    if critic is not None:
        found |= {f"critic.{name}": p for name, p in full_parameters(critic.parameters())}
    return {"parameters": found, "metrics": metrics}


def on_rank(sequence: int) -> dict[str, Any]:
    mesh = make_mesh(MeshSettings(sequence=sequence), CPU)
    return {
        "trained": [trained(algorithm, mesh) for algorithm in ALGORITHMS],
        "seen": tokens_seen(share_tokens(make_network(), mesh)),
        "saved": saved_bytes(share_tokens(make_network(), mesh)),
    }


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


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request, tmp_path_factory):
    return run_ranks(on_rank, request.param, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("index", range(len(ALGORITHMS)))
def test_three_steps_end_where_those_of_one_rank_end(ranks, index):
    alone = trained(ALGORITHMS[index])
    start = dict(make_network().model.named_parameters())
    for rank in ranks:
        together = rank["trained"][index]
        assert together["parameters"].keys() == alone["parameters"].keys()
        for name, parameter in alone["parameters"].items():
            torch.testing.assert_close(together["parameters"][name], parameter, rtol=0, atol=1e-5)
        for theirs, ours in zip(together["metrics"], alone["metrics"], strict=True):
            for name, value in ours.items():
                if name.startswith(("actor/", "critic/", "mismatch/", "reward/")):
                    assert theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    moved = [(alone["parameters"][name] - p).abs().max() for name, p in start.items()]
    assert max(moved) > 1e-3


def test_layers_see_their_share_of_the_tokens(ranks):
    lengths = [m.packing.ends[-1].item() for m in make_batch().pack(MAX_TOKENS, CPU)]
    assert any(length % len(ranks) for length in lengths), "an even batch proves little"
    for rank in ranks:
        for seen in rank["seen"].values():
            assert seen == [-(-length // len(ranks)) for length in lengths]


def test_a_rank_keeps_its_share_of_the_activations(ranks):
    alone = saved_bytes(make_network())
    for rank in ranks:
        assert rank["saved"] < 1.3 * alone / len(ranks)


def test_heads_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.sequence 3 does not divide the 4 "):
        require_shareable(make_network().model, 3)


@pytest.mark.parametrize(
    "model",
    [
        lambda: MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8)),
        lambda: Lfm2ForCausalLM(
            Lfm2Config(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=8,
                layer_types=["conv", "full_attention"],
            )
        ),
    ],
    ids=["recurrent", "hybrid"],
)
def test_layers_that_are_no_attention_are_refused(model):
    with pytest.raises(ConfigError, match=r"mesh\.sequence 2 .* layers that are no attention"):
        require_shareable(model(), 2)
