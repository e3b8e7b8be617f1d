"""Prompts that siblings share are computed once, and nothing else changes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from learners.batch.micro_batch import MicroBatch, SharedPrompts, rows
from learners.policy import attention
from learners.policy.network import Network
from learners.profiling import NetworkFlops
from tests.model_families import FAMILIES, UNPACKED, WINDOW, make_model
from tests.tiny_model import make_llama
from tests.training import make_config, make_network, make_trainer, sibling_batch

CPU = torch.device("cpu")
GROUPS = ((3, (4, 1, 6)), (2 * WINDOW + 1, (3, WINDOW, 2)), (1, (1,)), (5, (2, 40)))
"""Tokens of the prompt, and of the responses to it."""


def make_micro_batch() -> MicroBatch:
    batch = sibling_batch(GROUPS)
    return batch.micro_batch(range(len(batch)), CPU)


def computed(network: Network, micro_batch: MicroBatch) -> list[torch.Tensor]:
    """Log-probabilities, entropies, and the gradient of every parameter."""
    network.zero_grad()
    output = network(micro_batch, with_entropy=True)
    assert output.logprobs is not None
    assert output.entropy is not None
    weights = torch.linspace(-1, 1, len(output.logprobs))
    (output.logprobs * weights + output.entropy * weights.flip(0)).sum().backward()
    gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    return [output.logprobs.detach(), output.entropy.detach(), *gradients]


def without_sharing(network: Network, micro_batch: MicroBatch) -> list[torch.Tensor]:
    network._may_share_prompts = False
    assert network.shared_prompts(micro_batch) is None
    return computed(network, micro_batch)


def assert_alike(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine - theirs).abs().max() < 1e-4 * (1 + theirs.abs().max())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNPACKED])
def test_a_family_that_shares_computes_the_same(family: str) -> None:
    network, micro_batch = Network(make_model(family), temperature=1.0), make_micro_batch()
    if network.shared_prompts(micro_batch) is None:
        pytest.skip("more than attention connects the tokens of this family")
    assert_alike(computed(network, micro_batch), without_sharing(network, micro_batch))


def test_each_prompt_is_there_once_and_last_tokens_are_not():
    ids = np.array([7, 8, 1, 2, 7, 8, 3, 9, 7, 8, 4, 5, 6])
    shared = SharedPrompts.of(ids, (4, 3, 1, 5), (2, 2, 1, 2), np.array([1, 2, 5, 9, 10, 11]), CPU)
    assert shared is not None
    assert ids[shared.tokens].tolist() == [7, 8, 1, 9, 4, 5]
    assert shared.predictors.tolist() == [1, 2, 1, 1, 4, 5]
    packing = shared.packing
    assert packing.lengths == (3, 2, 1, 4)
    assert packing.places is not None
    assert packing.places.tolist() == [0, 1, 2, 0, 1, 3, 0, 1, 4, 5]
    assert packing.positions.tolist() == [0, 1, 2, 0, 2, 3]
    assert packing.num_tokens == 6


def test_a_trajectory_without_response_is_one_token():
    ids = np.array([7, 7, 8, 1, 7, 8, 2])
    shared = SharedPrompts.of(ids, (1, 3, 3), (0, 2, 2), np.array([2, 5]), CPU)
    assert shared is not None
    assert shared.packing.lengths == (1, 2, 2)
    assert ids[shared.tokens].tolist() == [7, 7, 8]
    assert shared.predictors.tolist() == [2, 2]


def test_few_tokens_in_common_are_not_shared():
    batch = sibling_batch([(1, (30, 30)), (4, (9,))])
    assert batch.micro_batch(range(3), CPU).shared_prompts is None
    assert batch.micro_batch([], CPU).shared_prompts is None


def test_a_model_whose_positions_depend_on_the_row_does_not_share():
    factors = [1.0] * 4
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    model = make_llama(rope_parameters=longrope, num_attention_heads=4)
    assert Network(model, temperature=1.0).shared_prompts(make_micro_batch()) is None


def test_a_kernel_for_whole_trajectories_gets_them(monkeypatch):
    """On a GPU; here with the reference in place of the kernel."""
    network, micro_batch = make_network(), make_micro_batch()
    expected = computed(network, micro_batch)

    def kernel(query, key, value, ends, _, longest, longest_key, *, scale, window_size):
        lengths = tuple(ends.diff().tolist())
        assert longest == longest_key == max(lengths)
        assert window_size == (-1, 0)
        packing = attention.Packing(lengths, CPU)
        return bucketed(query, key, value, packing, attention.Scores(scale))

    bucketed = attention._bucketed
    monkeypatch.setattr(attention, "_torch_attention", kernel)
    monkeypatch.setattr(attention, "_bucketed", attention._unpadded)
    assert_alike(computed(network, micro_batch), expected)


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_step_is_the_same(advantage):
    """With values and their head, too."""
    batch, found = sibling_batch(GROUPS), []
    for may_share in (True, False):
        trainer = make_trainer(make_config(algorithm={"advantage": advantage}))
        networks = [r.network for r in (trainer.policy, trainer.critic) if r is not None]
        for network in networks:
            network._may_share_prompts = network._may_share_prompts and may_share
        metrics = trainer.step(batch)
        weights = [p.detach() for n in networks for p in n.parameters()]
        found.append((metrics["learner/grad_norm"], torch.cat([w.flatten() for w in weights])))
    (norm, ours), (plain_norm, plain) = found
    assert norm == pytest.approx(plain_norm, rel=1e-4)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)


def test_gradients_of_several_threads_are_the_same_bits():
    indices = torch.arange(400).repeat(50)
    tensor = torch.randn(400, 8, 16, requires_grad=True)
    upstream, found = torch.randn(len(indices), 8, 16), []
    num_threads = torch.get_num_threads()
    for threads in (1, 4, 4, 4):
        torch.set_num_threads(threads)
        found.append(torch.autograd.grad(rows(tensor, indices), tensor, upstream)[0])
    torch.set_num_threads(num_threads)
    assert all(torch.equal(gradient, found[0]) for gradient in found)


def test_operations_are_those_that_are_computed():
    network, micro_batch = make_network(), make_micro_batch()
    shared = network.shared_prompts(micro_batch)
    assert shared is not None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(micro_batch)
    counts = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    cost, packing = NetworkFlops.of(network), shared.packing
    num_logits = len(micro_batch.targets)
    attended = cost.forward(packing.lengths, 0, 0)
    assert cost.forward(packing.lengths, num_logits, packing.num_tokens) == counted + attended
