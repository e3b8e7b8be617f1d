"""Log-probabilities and gradients of every family are those of transformers, packed or not."""

import pytest
import torch

from learners.batch.micro_batch import MicroBatch
from learners.policy.decoder import carries_state
from learners.policy.network import Network
from learners.policy.packing_check import choose_packing
from streamrl.algorithms import logprobs as blocks
from streamrl.algorithms.routing import ROUTERS
from tests.documents import ROOT
from tests.model_families import (
    DOCUMENTED,
    FAMILIES,
    ROUTED,
    SEEN_BY_TRIAL,
    STATEFUL,
    UNPACKED,
    WINDOW,
    assert_alike,
    gradients_of,
    make_model,
    plain_logprobs,
)
from tests.model_gaps import documented_name
from tests.training import make_micro_batch

LENGTHS = (1, 3 * WINDOW, 5, 2, 1, 2 * WINDOW + 3, 9)


def make_network(family: str) -> Network:
    return Network(make_model(family), temperature=1.0)


def plain(network: Network, micro_batch: MicroBatch) -> torch.Tensor:
    network.model.set_attn_implementation("eager")
    rows = micro_batch.token_ids[0].split(micro_batch.packing.lengths)
    return torch.cat([plain_logprobs(network.model, row) for row in rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradients_are_those_of_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the vocabulary in several blocks, whose logits the backward pass computes again.

    A network that is not compared runs the same way, but for the families that a trial alone shows.
    """
    monkeypatch.setattr(blocks, "MIN_BLOCK", 24)
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "KEPT_ELEMENTS", 0)
    network, micro_batch = make_network(family), make_micro_batch(LENGTHS)
    expected = plain(network, micro_batch)
    expected_gradients = gradients_of(network, expected)
    assert network.is_packed == (family not in UNPACKED - SEEN_BY_TRIAL)
    choose_packing(network)
    logprobs = network(micro_batch).logprobs
    assert network.is_packed == (family not in UNPACKED)
    assert carries_state(network.model) == (family in STATEFUL)
    kinds = {type(module).__name__ for module in network.modules()}
    assert bool(kinds & ROUTERS) == (family in ROUTED)
    assert expected.std() > 1, "the model predicts something"
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert_alike(gradients_of(network, logprobs), expected_gradients)


def test_the_table_of_the_documents_has_every_family_and_how_it_runs():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [
        row.removeprefix("| ").removesuffix(" |").split(" | ")
        for row in text.splitlines()
        if row.startswith(("| packed | ", "| unpacked | "))
    ]
    documented = {
        member: how == "unpacked" for how, _, members in rows for member in members.split(", ")
    }
    assert documented == {documented_name(family): family in UNPACKED for family in DOCUMENTED}
    assert max(float(gap) for _, gap, _ in rows) <= 1e-4
