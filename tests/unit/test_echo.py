"""ECHO: the cross-entropy of what the policy read between its turns, by its formula."""

from typing import Any

import pytest
import torch
from msgspec import structs

from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.trainer import Trainer
from streamrl.algorithms.losses import BatchTotals, ObservedInput, observation_loss
from streamrl.algorithms.sequences import Sequences
from streamrl.config import RunConfig
from streamrl.types import Media, Trajectory, TrajectoryGroup
from tests.settings import LossConfig
from tests.training import (
    make_config,
    make_groups,
    make_policy,
    make_trainer,
    observing,
    poison,
    poisoned,
    sibling_batch,
)

CPU = torch.device("cpu")
IMAGE = Media.image(b"a picture")


def configure(max_tokens: int = 10_000, **algorithm: Any) -> RunConfig:
    return make_config(
        algorithm={"echo_coef": 1.0, **algorithm},
        learner={"max_tokens_per_micro_batch": max_tokens},
        generator={"environment": "tools"},
    )


def groups() -> list[TrajectoryGroup]:
    return list(map(observing, make_groups()))


def read_between(trajectory: Trajectory) -> list[int]:
    """The places of the tokens between the first and the last that were sampled."""
    sampled = trajectory.response_mask.nonzero()[0].tolist()
    return [i for i in range(sampled[0], sampled[-1]) if i not in sampled]


def cross_entropies(trainer: Trainer, trajectories: list[Trajectory]) -> list[torch.Tensor]:
    """Of each trajectory that read something [its observed tokens], by the model's own forward."""
    trainer.policy.network.run_packed(False)
    found = []
    for t in trajectories:
        ids, places = torch.from_numpy(t.token_ids).long(), read_between(t)
        logits = trainer.policy.model(ids[None]).logits[0].double().log_softmax(-1)
        found.append(-logits[[p - 1 for p in places], ids[places]])
    return [tokens for tokens in found if len(tokens)]


def members(given: list[TrajectoryGroup]) -> list[Trajectory]:
    return [t for group in given for t in group.trajectories]


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in trainer.policy.parameters().items()}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1.0 + 2.0 + 6.0) / 3),
        ("seq-mean-token-mean", ((1.0 + 2.0) / 2 + 6.0) / 2),
        ("seq-mean-token-sum", ((1.0 + 2.0) + 6.0) / 2),
        ("token-sum", 9.0),
    ],
)
def test_the_loss_is_the_mean_over_observed_tokens(mode: str, expected: float):
    logprobs = torch.tensor([-1.0, -2.0, -6.0], dtype=torch.float64)
    sequences = Sequences.from_lengths([2, 0, 1])
    observed = ObservedInput(logprobs, sequences, BatchTotals.of(sequences))
    loss = observation_loss(observed, LossConfig(loss_agg_mode=mode))
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_the_gradient_is_that_of_the_models_own_cross_entropy(mode: str, max_tokens: int):
    """Whole or cut into micro-batches, whatever the rewards."""
    config = configure(max_tokens, rl_loss_coef=0.0, loss_config={"loss_agg_mode": mode})
    trainer, reference = make_trainer(config), make_trainer(config)
    given = groups()
    trainer.accumulate(TrainingBatch.of(given, policy_version=4))
    found = cross_entropies(reference, members(given))
    tokens = torch.cat(found).mean()
    loss = tokens if mode == "token-mean" else torch.stack([one.mean() for one in found]).mean()
    loss.backward()
    for name, expected in gradients(reference).items():
        assert torch.allclose(gradients(trainer)[name], expected, rtol=1e-3, atol=1e-6), name
    metrics = trainer.update()
    assert metrics["actor/observation_loss"] == pytest.approx(loss.item(), rel=1e-5)
    num_read = sum(map(len, found))
    num_sampled = sum(t.num_response_tokens for t in members(given))
    share = num_read / (num_read + num_sampled)
    assert metrics["actor/observation_token_frac"] == pytest.approx(share)


def test_the_policy_loss_stays_what_it_is():
    batch = TrainingBatch.of(groups(), policy_version=4)
    parts = {}
    for name, algorithm in {
        "both": {"echo_coef": 0.5},
        "policy": {"echo_coef": 0.0},
        "echo": {"echo_coef": 0.5, "rl_loss_coef": 0.0},
    }.items():
        trainer = make_trainer(configure(**algorithm))
        trainer.accumulate(batch)
        parts[name] = gradients(trainer)
    for name, both in parts["both"].items():
        total = parts["policy"][name] + parts["echo"][name]
        assert torch.allclose(both, total, rtol=1e-4, atol=1e-6), name


def siblings() -> TrainingBatch:
    """Of one prompt, so that it is computed once."""
    trajectories = sibling_batch([(9, (3, 12, 7, 2))]).trajectories
    group = structs.replace(groups()[0], trajectories=trajectories)
    return TrainingBatch.of([observing(group)], policy_version=4)


def observed_logprobs(micro_batch: MicroBatch, *, packed: bool = True) -> torch.Tensor:
    network = make_policy().network
    network.run_packed(packed)
    logprobs = network(micro_batch, with_observed=True).observed_logprobs
    assert logprobs is not None
    return logprobs


def test_packed_unpacked_and_with_shared_prompts_they_are_alike():
    batch, everyone = siblings(), range(4)
    shared = batch.micro_batch(everyone, CPU)
    apart = batch.micro_batch(everyone, CPU, shares_prompts=False)
    assert shared.shared_prompts is not None
    assert apart.shared_prompts is None
    expected = observed_logprobs(apart, packed=False)
    assert len(expected) == 1 + 4 + 2
    assert torch.allclose(observed_logprobs(apart), expected, atol=1e-5)
    assert torch.allclose(observed_logprobs(shared), expected, atol=1e-5)
    kept = torch.tensor([False, True, False, True])
    assert torch.allclose(observed_logprobs(shared.select(kept)), expected[1:5], atol=1e-5)


def test_prompts_and_trajectories_with_images_have_none():
    given = groups()
    micro_batch = TrainingBatch.of(given, policy_version=4).micro_batch(range(20), CPU)
    expected = [len(read_between(t)) for t in members(given)]
    assert micro_batch.observed.sequences.lengths.tolist() == expected
    seeing = structs.replace(
        given[0],
        trajectories=tuple(structs.replace(t, media=(IMAGE.id,)) for t in given[0].trajectories),
        media=(IMAGE,),
    )
    batch = TrainingBatch.of([seeing, *given[1:]], policy_version=4)
    found = batch.micro_batch(range(20), CPU).observed.sequences.lengths.tolist()
    assert found == [0, 0, 0, 0, *expected[4:]]
    assert not batch.micro_batch([], CPU).observed.targets.numel()


def test_a_step_whose_sampled_tokens_are_all_masked_learns_from_the_answers():
    config = configure(reward={"difficulty_high": -1.0})
    trainer = make_trainer(config)
    before = {n: p.detach().clone() for n, p in trainer.policy.parameters().items()}
    metrics = trainer.step(TrainingBatch.of(groups(), policy_version=4))
    assert metrics["actor/trained_token_frac"] == metrics["learner/num_masked_updates"] == 0
    assert metrics["actor/observation_token_frac"] == 1
    assert any(not torch.equal(p, before[n]) for n, p in trainer.policy.parameters().items())


def test_a_trajectory_that_is_not_finite_leaves_both_terms():
    given, trainer = groups(), make_trainer(configure())
    poison(trainer)
    left = [t for t in members(given) if t is not given[0].trajectories[0]]
    found = cross_entropies(make_trainer(configure()), left)
    assert read_between(given[0].trajectories[0])
    metrics = trainer.step(TrainingBatch.of(poisoned(given, (0, 0)), policy_version=4))
    assert metrics["learner/num_nonfinite_sequences"] == 1
    expected = torch.cat(found).mean().item()
    assert metrics["actor/observation_loss"] == pytest.approx(expected, rel=1e-4)


def test_it_is_refused_where_nothing_is_read_between_turns():
    with pytest.raises(ValueError, match=r"echo_coef 0\.05 cannot act: .* single_turn has one"):
        make_config(algorithm={"echo_coef": 0.05})
