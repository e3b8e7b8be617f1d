"""Within a micro-batch the host never waits for a GPU, so that it has the next work ready."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learners.batch.micro_batch import Packing
from learners.objective.gradient import Gradient
from learners.objective.targets import PolicyPasses
from learners.optimizer import LossScale
from learners.parallel.ranks import Ranks
from learners.policy.network import Network
from learners.policy.policy import Policy
from learners.policy.router_replay import RouterRecords
from learners.policy.sharding import compute_in
from streamrl.algorithms.candidates import Candidates, candidate_logprobs, masked_logprobs
from streamrl.algorithms.losses import POLICY_LOSSES, LossInput
from streamrl.algorithms.rollout_is import rollout_is_weights
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.losses import LOSS_SETTINGS
from streamrl.config.algorithm.rollout_is import ROLLOUT_IS_PRESETS
from streamrl.types import RoutedExperts
from tests.model_families import make_model
from tests.pretended_gpu import GPU, NeverWaits, PretendedGpu, WaitsForTheGpu
from tests.settings import LossConfig
from tests.training import make_batch, make_config, make_trainer

CORRECTED = {"rejection": [{"token_k1": 2.0}, {"seq_max_k3": 0.5}], "veto_threshold": 1e-4}


class Watched(Gradient):
    def _backward(self, *given: Any) -> Any:
        with NeverWaits():
            return super()._backward(*given)


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("Llama", {}),
        ("Qwen3", {"entropy_coef": 0.1, "kl_loss": {"coef": 0.1}, "rollout_is": CORRECTED}),
        ("Llama", {"kl_loss": {"coef": 0.1, "kind": "full"}, "rollout_is": "m2po"}),
    ],
)
def test_a_micro_batch_makes_the_host_wait_nowhere(family: str, algorithm: dict) -> None:
    config, batch = make_config(algorithm=algorithm), make_batch()
    on_host = make_trainer(config)
    micro_batches = on_host._pack(batch)
    targets, _ = on_host._targets.collect(batch, micro_batches)
    targets, _ = on_host._targets.of_update(batch, targets, micro_batches, [*range(len(batch))])
    model = make_model(family).to("meta")
    with PretendedGpu():
        network = Network(model, temperature=1.0)
        compute_in(network, torch.bfloat16)
        policy = Policy(network)
        passes = PolicyPasses(config, policy, policy)
        watched = Watched(config, policy, passes, None, Ranks(), LossScale("bfloat16"))
        work = tuple((m, targets) for m in batch.pack(150, policy.device))
        assert len(work) > 1
        accumulated, _ = watched._add(work, None, len(batch))
    assert policy.device == GPU
    assert all(p.grad is not None for p in policy.parameters().values())
    assert accumulated.terms["actor/pg_loss"].is_meta


@pytest.mark.parametrize("loss", sorted(set(LOSS_SETTINGS) - {"clip_cov"}))
def test_a_loss_makes_the_host_wait_nowhere(loss: str) -> None:
    lengths = [3, 0, 4]
    with PretendedGpu(), NeverWaits():
        column = torch.zeros(7, device=GPU)
        logprobs = column.clone().requires_grad_()
        sequences = Sequences.from_lengths(lengths)
        rewards = torch.zeros(3, device=GPU)
        given = LossInput(logprobs, column, column, column, sequences, rewards=rewards)
        POLICY_LOSSES[loss](given, LossConfig()).loss.backward()
    assert logprobs.grad is not None


@pytest.mark.parametrize("preset", sorted(set(ROLLOUT_IS_PRESETS) - {"m2po"}))
def test_a_correction_makes_the_host_wait_nowhere(preset: str) -> None:
    config = ROLLOUT_IS_PRESETS[preset]
    with PretendedGpu(), NeverWaits():
        column = torch.zeros(7, device=GPU)
        staleness = torch.zeros(7, dtype=torch.int64, device=GPU)
        found = rollout_is_weights(
            column, column, Sequences.from_lengths([3, 0, 4]), config, staleness, None, column
        )
        weights, _ = found.loss_terms(config)
    assert weights is None or weights.is_meta


def test_the_rows_of_padded_attention_make_the_host_wait_nowhere() -> None:
    with PretendedGpu(), NeverWaits():
        packing = Packing((3, 40, 5), GPU)
        found = (packing.order, *packing.buckets[0], *packing.unpadded_buckets[0])
    assert all(tensor.is_meta for tensor in found)


def test_the_candidates_of_all_rows_make_the_host_wait_nowhere() -> None:
    with PretendedGpu(), NeverWaits():
        ids = torch.zeros(6, dtype=torch.int64, device=GPU)
        candidates = Candidates(ids, ids, 3)
        hidden, head = torch.zeros(3, 4, device=GPU), torch.zeros(8, 4, device=GPU)
        own = candidates.rows(0, 3)
        column = candidate_logprobs(hidden, head, ids[:3], hidden[:, 0], own)
    assert column.shape == (6,)
    with PretendedGpu(), pytest.raises((RuntimeError, NotImplementedError, WaitsForTheGpu)):
        candidates.rows(1, 3)


def test_sampling_masks_of_all_tokens_make_the_host_wait_nowhere() -> None:
    with PretendedGpu(), NeverWaits():
        ids = torch.zeros(6, dtype=torch.int64, device=GPU)
        hidden = torch.zeros(3, 4, device=GPU, requires_grad=True)
        head = torch.zeros(8, 4, device=GPU, requires_grad=True)
        mask = Candidates(ids, ids, 3, has_all_rows=True)
        found = masked_logprobs(hidden, head, ids[:3], mask, with_entropy=True)
        (found.logprobs + found.entropy + mask.counts).sum().backward()
    assert head.grad is not None


def test_recorded_experts_make_the_host_wait_nowhere() -> None:
    records = RouterRecords(make_model("Qwen3-MoE"), "replay")
    config = make_model("Qwen3-MoE").config
    sizes = config.num_hidden_layers, config.num_experts_per_tok
    rows = np.zeros((4, *sizes), np.int16)
    with PretendedGpu():
        (micro_batch,) = make_batch(num_groups=1, group_size=1).pack(100, GPU)
        num_tokens = micro_batch.packing.num_tokens
        recorded = RoutedExperts.of(rows[: num_tokens - 1], num_tokens)
        with NeverWaits():
            found = records.of(replace(micro_batch, routed_experts=recorded))
    assert found is not None
    assert found.is_meta


def test_what_makes_it_wait_is_seen() -> None:
    with PretendedGpu(), NeverWaits():
        column = torch.zeros(3, device=GPU)
        assert (column.is_cuda, column.device) == (True, GPU)
        for waits in (
            lambda: torch.zeros(3).to(GPU),
            lambda: torch.tensor([1.0], device=GPU),
            lambda: column.new_tensor([1.0]),
            lambda: column + torch.zeros(3),
            lambda: column[torch.tensor([0])],
        ):
            with pytest.raises(WaitsForTheGpu):
                waits()
        for needs_numbers in (
            lambda: column.sum().item(),
            lambda: bool(column.any()),
            lambda: column.tolist(),
            lambda: column.cpu(),
            lambda: column.nonzero(),
            lambda: column[column > 0],
        ):
            with pytest.raises((RuntimeError, NotImplementedError, WaitsForTheGpu)):
                needs_numbers()
