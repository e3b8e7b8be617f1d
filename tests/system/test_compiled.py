"""Compiled layers compute what plain ones do, for micro-batches of other lengths as well."""

import shutil

import pytest
import torch

from learners.policy.compiled import compile_layers
from learners.policy.network import Network
from tests.training import make_batch, make_network

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def gradients(network: Network, seed: int) -> dict[str, torch.Tensor]:
    network.zero_grad()
    for micro_batch in make_batch(seed).pack(100, network.device):
        (-network(micro_batch).logprobs.sum()).backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


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
