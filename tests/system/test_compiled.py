"""Compiled layers compute what plain ones do, for micro-batches of other lengths as well."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from learners.parallel.mesh import make_mesh
from learners.policy import loading
from learners.policy.decoding import sequence_block
from learners.policy.loading import compile_layers, load_network
from learners.policy.network import Network
from streamrl.config.learner import MeshSettings
from tests.ranks import run_ranks
from tests.tiny_model import save_llama
from tests.training import make_batch, make_config, make_network

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


@NEEDS_COMPILER
def test_the_setting_compiles_every_layer_of_the_model_that_is_loaded(tmp_path: Path):
    sections = {"model": {"path": str(save_llama(tmp_path, num_hidden_layers=1))}}
    plain = load_network(make_config(**sections))
    compiled = load_network(make_config(**sections, learner={"compile": True}))
    for network, is_compiled in ((plain, False), (compiled, True)):
        layers = network.model.model.layers
        assert [layer._compiled_call_impl is not None for layer in layers] == [is_compiled]
    assert torch.allclose(logprobs(compiled), logprobs(plain), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "is_compiled"),
    [
        ({}, True),
        ({"run": {"max_steps": 299}}, False),
        ({"algorithm": {"router_replay": "record"}}, False),
        ({"learner": {"compile": False}}, False),
        ({"run": {"max_steps": 1}, "learner": {"compile": True}}, True),
    ],
)
def test_by_default_long_runs_on_a_gpu_are_compiled(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, dict[str, Any]], is_compiled: bool
):
    monkeypatch.setattr(loading, "has_compiler", lambda: True)
    config = make_config(**{"run": {"max_steps": 300}, **settings})
    assert loading.compiles(config, torch.device("cuda")) == is_compiled
    on_cpu = config.learner.compile is True
    assert loading.compiles(config, torch.device("cpu")) == on_cpu
    monkeypatch.setattr(loading, "has_compiler", lambda: False)
    assert loading.compiles(config, torch.device("cuda")) == on_cpu


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
