"""Data of the very policy that is trained: each correction makes the update of no correction."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec import structs

from learners.batch.training_batch import TrainingBatch
from learners.trainer import Trainer
from streamrl.types import TrajectoryGroup
from tests.training import make_batch, make_config, make_groups, make_trainer

CORRECTIONS: list[dict[str, Any]] = [
    {"rollout_is": "m2po"},
    {"rollout_is": "m2po", "proximal": "behavior"},
    {"rollout_is": "vcpo"},
    {"rollout_is": {"second_moment": 0.04, "scale_lr": True, "apply": False}},
    {"loss": "vespo", "proximal": "behavior"},
    {"loss": "vespo", "rollout_is": "m2po"},
    {"loss": "dppo_tv", "proximal": "behavior"},
    {"loss": "dppo_tv", "proximal": "behavior", "loss_config": {"log_ratio_coef": 0.1}},
    {"proximal": "linear"},
    {"rollout_is": "sequence_clip"},
    {"rollout_is": "geometric_clip", "proximal": "loglinear"},
]


def groups_on_policy(trainer: Trainer) -> list[TrajectoryGroup]:
    """With the trainer's own log-probabilities as those of the behavior policy, at its version."""
    groups = make_groups()
    logprobs = trainer.logprobs(TrainingBatch.of(groups, policy_version=4)).numpy()
    return list(_with_logprobs(groups, logprobs))


def _with_logprobs(groups: Sequence[TrajectoryGroup], logprobs: Any) -> Any:
    start = 0
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            mask, behavior = trajectory.response_mask, trajectory.behavior_logprobs.copy()
            behavior[mask] = logprobs[start : start + mask.sum()]
            start += mask.sum()
            versions = trajectory.policy_versions.copy()
            versions[mask] = 4
            members.append(
                structs.replace(trajectory, behavior_logprobs=behavior, policy_versions=versions)
            )
        yield structs.replace(group, trajectories=tuple(members))


def step(algorithm: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradient and metrics of a step on policy."""
    trainer = make_trainer(make_config(algorithm=algorithm, optimizer={"max_grad_norm": None}))
    trainer.accumulate(TrainingBatch.of(groups_on_policy(trainer), policy_version=4))
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.policy.parameters().items()
        if parameter.grad is not None
    }
    return gradients, trainer.update()


@pytest.mark.parametrize("algorithm", CORRECTIONS, ids=str)
def test_a_correction_has_exactly_the_gradient_and_the_rate_of_none(algorithm):
    plain, uncorrected = step({"rollout_is": "off"})
    gradients, metrics = step(algorithm)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name
    assert metrics["learner/lr"] == uncorrected["learner/lr"]
    assert metrics["actor/trained_token_frac"] == 1


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_learning_rate_falls_with_the_effective_sample_size(proximal, num_updates):
    """Of the sequences of the batch; with the ratio to the behavior policy of each update."""
    section = {"rollout_is": {"level": "sequence", "scale_lr": True}, "proximal": proximal}
    learner = {"updates_per_batch": num_updates}
    trainer = make_trainer(make_config(algorithm=section, learner=learner))
    batch = make_batch()
    log_ratios = batch.sequences.sum(trainer.logprobs(batch) - batch.behavior_logprobs).double()
    ratios = log_ratios.clamp(-20, 20).exp()
    ess = float(ratios.sum() ** 2 / ratios.square().sum() / len(ratios))
    metrics = trainer.step(batch)
    assert 0 < ess < 0.9
    if proximal == "recompute" or num_updates == 1:
        assert metrics["mismatch/sequence_eff_sample_size"] == pytest.approx(ess, rel=1e-3)
        assert metrics["learner/lr"] == pytest.approx(1e-3 * ess**0.5, rel=1e-3)
    else:
        assert 0 < metrics["learner/lr"] < 1e-3


def test_the_tokens_that_m2po_masks_have_no_part_in_the_gradient():
    """By hand: the mask of the batch, from the log-ratios and advantages of all of its groups."""
    section = {"rollout_is": {"threshold": 1e6, "second_moment": 1.0}}
    trainer = make_trainer(make_config(algorithm=section))
    batch = make_batch()
    log_ratio = (trainer.logprobs(batch) - batch.behavior_logprobs).double()
    groups = batch.rewards.split(4)
    advantages = torch.cat([(r - r.mean()) / (r.std() + 1e-6) for r in groups])
    harmful = batch.sequences.expand(advantages).sign() * log_ratio > 0
    squares, keep = log_ratio.square(), torch.ones_like(harmful)
    while squares[harmful & keep].mean() > 1.0:
        keep[torch.where(harmful & keep, squares, -1.0).argmax()] = False
    metrics = trainer.step(batch)
    assert 0.5 < float(keep.float().mean()) < 1
    assert metrics["actor/trained_token_frac"] == pytest.approx(float(keep.float().mean()))
    assert metrics["mismatch/second_moment"] == pytest.approx(
        float(squares[harmful].mean()), rel=1e-4
    )
