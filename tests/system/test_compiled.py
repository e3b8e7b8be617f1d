"""Compiled layers compute what plain ones do, for micro-batches of other lengths as well."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from learners.parallel.mesh import make_mesh
from learners.policy.fusion import compile_layers
from learners.policy.loading import load_network
from learners.policy.network import Network
from learners.policy.sequence_parallel import sequence_block
from learners.policy.sharding import checkpoint_layers
from streamrl.config.learner import MeshSettings
from tests.model_families import (
    FAMILIES,
    STATEFUL,
    UNPACKED,
    WINDOW,
    assert_alike,
    gradients_of,
    make_model,
)
from tests.ranks import run_ranks
from tests.tiny_model import save_llama
from tests.training import make_batch, make_config, make_micro_batch, make_network

FIRST = (3, 4, 3 * WINDOW, 2 * WINDOW + 3, 5, WINDOW + 1, 2)
SECOND = (4, 3, 3 * WINDOW + 1, 2 * WINDOW + 5, 6, WINDOW + 3, 2)
"""Tokens of trajectories: unpacked, within a window and beyond it, alone in a call and in twos."""
DIFFERENTIATED = ("GPT-2", "Qwen3-MoE")
"""Families whose backward passes are compiled, too, which takes three times as long."""
LIKE_LLAMA = {
    *("Apertus", "Arcee", "CWM", "ERNIE 4.5", "GLM", "Granite", "Granite-SWA", "Helium", "Hunyuan"),
    *("HyperCLOVA X", "Ministral", "Ministral 3", "Mistral with windows", "nanochat", "OLMo"),
    *("Phi", "Qwen2", "Qwen2 with windows", "Seed-OSS", "SmolLM3", "StarCoder2 with windows"),
}
"""Families whose layers differ from Llama's in numbers, biases, norms and activations alone."""
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def gradients(network: Network, seed: int) -> dict[str, torch.Tensor]:
    network.zero_grad()
    for micro_batch in make_batch(seed).pack(100, network.device):
        (-network(micro_batch).logprobs.sum()).backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.long
@NEEDS_COMPILER
def test_compiled_layers_have_the_gradients_and_the_names_of_plain_ones():
    plain, compiled = make_network(num_hidden_layers=1), make_network(num_hidden_layers=1)
    compile_layers(compiled)
    for seed in range(2):
        expected, found = gradients(plain, seed), gradients(compiled, seed)
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            assert torch.allclose(found[name], gradient, atol=1e-5 * scale), name


@pytest.mark.long
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in STATEFUL | LIKE_LLAMA])
def test_a_family_keeps_its_gradients_and_is_compiled_once(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    """Up to the graph that a compiler would be given: other numbers of tokens make no new one."""
    network = Network(make_model(family), temperature=1.0)
    network.run_packed(family not in UNPACKED)
    micro_batches = [make_micro_batch(lengths) for lengths in (FIRST, SECOND)]
    plain = [gradients_of(network, network(m).logprobs) for m in micro_batches]
    backend = "aot_eager" if family in DIFFERENTIATED else "eager"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    compile_layers(network)
    num_graphs = []
    for micro_batch, expected in zip(micro_batches, plain, strict=True):
        assert_alike(gradients_of(network, network(micro_batch).logprobs), expected)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0
    assert num_graphs[1] == num_graphs[0]


def test_the_setting_compiles_every_layer_of_the_model_that_is_loaded(tmp_path: Path):
    sections = {"model": {"path": str(save_llama(tmp_path, num_hidden_layers=2))}}
    for compiles in (False, True):
        network = load_network(make_config(**sections, learner={"compile": compiles}))
        layers = network.model.model.layers
        assert [hasattr(one.forward, "_torchdynamo_orig_callable") for one in layers] == (
            [compiles] * 2
        )


@pytest.mark.parametrize("on_host", [False, True], ids=["", "offloaded"])
def test_layers_that_are_recomputed_are_compiled(on_host: bool, monkeypatch: pytest.MonkeyPatch):
    expected = gradients(make_network(), 0)
    network = make_network()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    compile_layers(network)
    checkpoint_layers(network, on_host=on_host)
    assert_alike(gradients(network, 0), expected)
    assert counters["stats"]["unique_graphs"] > 0


def logprobs_of_shared_tokens() -> torch.Tensor:
    """Of a network whose tokens two ranks share."""
    network = make_network(num_hidden_layers=1)
    mesh = make_mesh(MeshSettings(sequence=2), torch.device("cpu"))
    network.sequence_block = sequence_block(network.model, mesh)
    compile_layers(network)
    return logprobs(network)


def logprobs(network: Network) -> torch.Tensor:
    with torch.no_grad():
        passes = [network(m).logprobs for m in make_batch(0).pack(100, network.device)]
    return torch.cat(passes)


@pytest.mark.long
@NEEDS_COMPILER
def test_ranks_that_share_tokens_compute_the_same_with_compiled_layers(tmp_path: Path):
    expected = logprobs(make_network(num_hidden_layers=1))
    for found in run_ranks(logprobs_of_shared_tokens, 2, tmp_path):
        assert torch.allclose(found, expected, atol=1e-5)
