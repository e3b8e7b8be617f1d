"""Trajectories that a limit cut: trained, masked in the loss, or penalized."""

import dataclasses

import pytest
import torch
from msgspec import structs

from learners.batch.training_batch import TrainingBatch
from learners.objective.credit import CreditAssigner
from learners.trainer import Trainer
from streamrl.types import FinishReason
from tests.tiny_model import make_llama
from tests.training import make_config, make_groups, make_policy
from tests.unit.test_training import plain_logprobs

REASONS = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP, FinishReason.DEADLINE]


def batch_with(reasons: list[FinishReason]) -> TrainingBatch:
    """Groups of four, each of which ended for these reasons."""
    groups = tuple(
        structs.replace(
            group,
            trajectories=tuple(
                structs.replace(t, finish_reason=reasons[i % 4])
                for i, t in enumerate(group.trajectories)
            ),
        )
        for group in make_groups()
    )
    return TrainingBatch.of(groups, policy_version=4)


def gradients(batch: TrainingBatch, reward: dict[str, object], max_tokens: int = 10_000):
    """Of one step, by name, and the step's metrics."""
    config = make_config(
        algorithm={"advantage": "grpo", "reward": reward},
        optimizer={"max_grad_norm": None},
        learner={"max_tokens_per_micro_batch": max_tokens},
    )
    trainer = Trainer(config, make_policy())
    seen: dict[str, torch.Tensor] = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            {
                n: p.grad.clone()
                for n, p in trainer.policy.parameters().items()
                if p.grad is not None
            }
        )
    )
    return seen, trainer.step(batch)


def are_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours
    )


def test_truncated_trajectories_are_trained_by_default():
    truncated, metrics = gradients(batch_with(REASONS), {})
    whole, _ = gradients(batch_with([FinishReason.STOP] * 4), {})
    assert are_close(truncated, whole)
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["response_length/deadline_ratio"] == 0.25


def test_masked_ones_count_for_their_siblings_advantages_and_for_nothing_else():
    """GRPO, token mean, truncated token weights, written out by hand for the tokens that count."""
    model, batch = make_llama(), batch_with(REASONS)
    rewards = batch.rewards.view(-1, 4)
    spread = rewards.std(1, keepdim=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
    loss, num_counted = torch.zeros(()), 0
    for i in range(0, 20, 2):
        trajectory = batch.trajectories[i]
        logprobs = plain_logprobs(model, trajectory)
        behavior = torch.from_numpy(trajectory.behavior_logprobs[trajectory.response_mask])
        weights = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (weights * ratio * advantages[i]).sum()
        num_counted += len(logprobs)
    (loss / num_counted).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for max_tokens in (10_000, 24):
        masked, _ = gradients(batch, {"truncated": "mask"}, max_tokens)
        assert are_close(masked, expected)


def test_a_batch_of_masked_trajectories_has_no_gradient():
    masked, metrics = gradients(batch_with([FinishReason.LENGTH] * 4), {"truncated": "mask"})
    assert not any(gradient.any() for gradient in masked.values())
    assert metrics["actor/loss"] == 0.0


def test_both_masks_hold():
    reward = {"truncated": "mask", "difficulty_high": 0.5}
    config = make_config(algorithm={"advantage": "grpo", "reward": reward})
    batch = batch_with(REASONS)
    mask = CreditAssigner(config.algorithm).assign(batch).loss_mask
    is_hard = batch.rewards.view(-1, 4).mean(1).repeat_interleave(4) < 0.5
    assert is_hard.any()
    assert not is_hard.all()
    assert torch.equal(mask, batch.sequences.expand(is_hard & ~batch.is_truncated))


@pytest.mark.parametrize("norm_mean", [None, "batch"])
def test_a_penalty_is_subtracted_before_rewards_are_compared(norm_mean: str | None):
    reward = {"truncated": "penalize", "truncated_penalty": 0.5, "norm_mean": norm_mean}
    algorithm = make_config(algorithm={"advantage": "grpo", "reward": reward}).algorithm
    batch = batch_with(REASONS)
    credit = CreditAssigner(algorithm).assign(batch)
    penalized = batch.rewards - 0.5 * batch.is_truncated
    plain = {"advantage": "grpo", "reward": {"norm_mean": norm_mean}}
    settings = make_config(algorithm=plain).algorithm
    expected = CreditAssigner(settings).assign(dataclasses.replace(batch, rewards=penalized))
    assert torch.allclose(credit.advantages, expected.advantages, atol=1e-6)
    assert credit.loss_mask is None
    _, metrics = gradients(batch, reward)
    assert metrics["reward/mean"] == pytest.approx(float(batch.rewards.mean()))
