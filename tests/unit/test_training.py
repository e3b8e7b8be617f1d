"""A step's update does not depend on how its batch was cut, and is the one the formulas say."""

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import LlamaForCausalLM

from learners.batch.training_batch import TrainingBatch
from learners.objective.credit import CreditAssigner
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import FinishReason, Trajectory, TrajectoryGroup
from tests.tiny_model import make_llama
from tests.training import (
    make_batch,
    make_config,
    make_critic,
    make_groups,
    make_policy,
    make_trainer,
    with_metrics,
)


def plain_logprobs(
    model: LlamaForCausalLM, trajectory: Trajectory, temperature: float = 1.0
) -> torch.Tensor:
    """Of the response tokens, by transformers' own forward pass of one trajectory."""
    ids = torch.from_numpy(trajectory.token_ids).long()[None]
    logprobs = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(trajectory.response_mask)[1:]]


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_equal_unpacked_ones(heads, temperature):
    policy = make_policy(temperature, num_key_value_heads=heads)
    batch = make_batch()
    micro_batch = batch.micro_batch(range(len(batch.trajectories)), policy.device)
    packed = policy(micro_batch).logprobs
    model = make_llama(num_key_value_heads=heads)
    plain = torch.cat([plain_logprobs(model, t, temperature) for t in batch.trajectories])
    assert torch.allclose(packed, plain, atol=2e-5)


@pytest.mark.parametrize("reward", [0.3, 0.7, 1.0, 10.1, -0.6])
def test_groups_of_one_reward_are_counted(reward):
    mixed, *alike = make_groups(num_groups=4, group_size=8)
    groups = [mixed, *(rewarded(group, reward) for group in alike)]
    metrics = make_trainer(make_config()).step(TrainingBatch.of(groups, 4))
    assert metrics["reward/groups_alike_frac"] == 0.75


def rewarded(group: TrajectoryGroup, reward: float) -> TrajectoryGroup:
    members = tuple(structs.replace(t, reward=reward) for t in group.trajectories)
    return structs.replace(group, trajectories=members)


def test_a_multi_turn_trajectory_counts_its_sampled_tokens_only():
    mask = np.array([False, True, True, False, False, True, False])
    trajectory = Trajectory(
        token_ids=np.arange(2, 9, dtype=np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -1.0, 0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        reward=1.0,
        finish_reason=FinishReason.STOP,
    )
    group = TrajectoryGroup(
        group_id="g", prompt_index=0, environment="test", trajectories=(trajectory,)
    )
    batch = TrainingBatch.of([group], policy_version=4)
    policy = make_policy()
    micro_batch = batch.micro_batch([0], policy.device)
    assert micro_batch.targets.tolist() == [3, 4, 7]
    packed = policy(micro_batch).logprobs
    assert torch.allclose(packed, plain_logprobs(make_llama(), trajectory), atol=2e-5)


def weights_after(
    config: RunConfig, num_steps: int = 2
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    trainer = make_trainer(config)
    for step in range(num_steps):
        metrics = trainer.step(make_batch(seed=step))
    return {n: p.detach().clone() for n, p in trainer.policy.parameters().items()}, metrics


ALGORITHMS = [
    {},
    {"loss_config": {"loss_agg_mode": "seq-mean-token-mean"}},
    {"loss_config": {"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss": "cispo"},
    {"rollout_is": {"mode": "clip", "normalize_by": "kept"}},
    {"rollout_is": {"level": "sequence", "batch_normalize": True, "veto_threshold": None}},
    {"rollout_is": "off", "entropy_coef": 0.1},
    {"proximal": "behavior"},
    {"proximal": "loglinear", "reward": {"difficulty_high": 0.5}},
    {"kl_loss": {"coef": 0.3, "kind": "full"}},
    {"kl_loss": {"coef": 0.3}, "kl_reward": {"coef": 0.1}},
    {"advantage": "gae"},
    {"advantage": "gae", "reward": {"difficulty_high": 0.5}},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_update_does_not_depend_on_how_the_batch_was_cut(algorithm):
    whole, whole_metrics = weights_after(make_config(algorithm=algorithm))
    cut, cut_metrics = weights_after(
        make_config(algorithm=algorithm, learner={"max_tokens_per_micro_batch": 24})
    )
    assert cut_metrics["learner/num_micro_batches"] > 8 * whole_metrics["learner/num_micro_batches"]
    for name, parameter in whole.items():
        assert torch.allclose(parameter, cut[name], atol=2e-5), name
    for name, value in whole_metrics.items():
        if name.startswith(("actor/", "critic/", "mismatch/", "reward/")) and "_p" not in name:
            assert cut_metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_the_gradient_is_that_of_the_formula():
    """GRPO, token mean, truncated token weights, one update: written out by hand."""
    model, batch = make_llama(), make_batch()
    advantages = []
    for start in range(0, 20, 4):
        rewards = batch.rewards[start : start + 4]
        advantages.append((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    loss = torch.zeros(())
    for trajectory, advantage in zip(batch.trajectories, torch.cat(advantages), strict=True):
        logprobs = plain_logprobs(model, trajectory)
        behavior = torch.from_numpy(trajectory.behavior_logprobs[trajectory.response_mask])
        weights = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (weights * ratio * advantage).sum()
    (loss / batch.sequences.num_tokens).backward()
    config = make_config(optimizer={"max_grad_norm": None}, algorithm={"advantage": "grpo"})
    trainer = Trainer(config, make_policy())
    gradients: dict[str, torch.Tensor] = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad for n, p in trainer.policy.parameters().items()})
    )
    trainer.step(batch)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-5), name


def test_exact_kl_is_the_sum_over_the_vocabulary():
    batch, policy, reference = make_batch(), make_policy(0.7), make_policy(0.7)
    with torch.no_grad():
        reference.model.get_output_embeddings().weight.mul_(1.5)
    micro_batch = batch.micro_batch(range(len(batch.trajectories)), policy.device)
    exact = policy(micro_batch, reference=reference(micro_batch)).kl
    policy_model, reference_model = make_llama(), make_llama()
    with torch.no_grad():
        reference_model.get_output_embeddings().weight.mul_(1.5)
    expected = []
    for trajectory in batch.trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()[None]
        models = (policy_model, reference_model)
        p, q = ((model(ids).logits[0, :-1] / 0.7).log_softmax(-1) for model in models)
        kl = (p.exp() * (p - q)).sum(-1)
        expected.append(kl[torch.from_numpy(trajectory.response_mask)[1:]])
    assert torch.allclose(exact, torch.cat(expected), atol=1e-5)
    assert (exact > 0).all()


def test_the_critic_learns_what_is_expected():
    config = make_config(
        algorithm={"advantage": "gae", "value": {"lr": 3e-3, "critic_warmup": 99}},
        optimizer={"max_grad_norm": None},
    )
    policy = make_policy()
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    critic = make_critic(config)
    trainer = Trainer(config, policy, critic=critic)
    losses = [trainer.step(make_batch())["critic/vf_loss"] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    batch = make_batch()
    micro_batch = batch.micro_batch(range(len(batch.trajectories)), policy.device)
    values = batch.sequences.mean(critic.batch_values([micro_batch], batch.sequences.num_tokens))
    assert float((values - batch.rewards).abs().mean()) < 0.2
    for name, parameter in policy.parameters().items():
        assert torch.equal(parameter, before[name]), f"{name} moved while the critic warmed up"


def test_remax_subtracts_the_greedy_reward():
    batch = make_batch()
    groups = [with_metrics(g, greedy_reward=0.25 * i) for i, g in enumerate(make_groups())]
    with_greedy = TrainingBatch.of(groups, policy_version=4)
    assigner = CreditAssigner(make_config(algorithm={"advantage": "remax"}).algorithm)
    credit = assigner.assign(with_greedy)
    expected = batch.sequences.expand(batch.rewards - 0.25 * batch.group_indices)
    assert torch.allclose(credit.advantages, expected, atol=1e-6)
    with pytest.raises(ConfigError, match="a group came without"):
        assigner.assign(batch)


@pytest.mark.parametrize(
    ("grouping", "compared"),
    [("state", range(6)), ("inductive", [0, 1, 0, 1, 0, 1]), ("batch", [0] * 6)],
)
def test_agentic_rewards_are_compared_as_the_configuration_says(grouping, compared):
    trajectories = make_batch(num_groups=1, group_size=12).trajectories
    groups = [
        TrajectoryGroup(
            group_id=str(i),
            prompt_index=i,
            environment=("maze", "shop")[i % 2],
            trajectories=tuple(
                structs.replace(t, metrics={"num_invalid_turns": float(i == 5)})
                for t in trajectories[2 * i : 2 * i + 2]
            ),
        )
        for i in range(6)
    ]
    agentic = {"grouping": grouping, "method": "mean"}
    config = make_config(
        algorithm={
            "advantage": "reinforce",
            "reward": {"agentic": agentic, "format_penalty": 0.5},
        }
    )
    batch = TrainingBatch.of(groups, 4)
    advantages = CreditAssigner(config.algorithm).assign(batch).advantages
    scores = np.array([t.reward for t in batch.trajectories]) - 0.5 * np.repeat(
        np.arange(6) == 5, 2
    )
    together = np.repeat(list(compared), 2)
    means = np.array([scores[together == label].mean() for label in together])
    expected = batch.sequences.expand(torch.from_numpy(scores - means).float())
    assert torch.allclose(advantages, expected)


def test_a_trajectory_above_the_limit_is_trained_as_the_others_are(caplog):
    """In a micro-batch of its own, with a warning while each is longer than those before."""
    lengths = [t.num_tokens for t in make_batch().trajectories]
    limit = sorted(lengths)[-3]
    updates = []
    for max_tokens in (limit, 10_000):
        learner = {"max_tokens_per_micro_batch": max_tokens}
        config = make_config(learner=learner, data={"source": "x", "max_prompt_length": 1})
        trainer = Trainer(config, make_policy())
        updates.append(trainer.step(make_batch()) | {"weights": trainer.policy.parameters()})
    cut, whole = updates
    assert cut["learner/num_long_trajectories"] == sum(length > limit for length in lengths)
    assert whole["learner/num_long_trajectories"] == 0
    assert cut["learner/grad_norm"] == pytest.approx(whole["learner/grad_norm"], rel=1e-5)
    (warning,) = [r.getMessage() for r in caplog.records if "of its own" in r.getMessage()]
    member = lengths.index(max(lengths))
    assert warning.startswith(f"prompt {member // 4}: a trajectory of {max(lengths)} tokens")


def test_a_gradient_that_is_not_finite_changes_nothing():
    trainer = Trainer(make_config(), make_policy())
    with torch.no_grad():
        trainer.policy.model.get_output_embeddings().weight[5, 0] = torch.inf
    before = [p.detach().clone() for p in trainer.policy.model.parameters()]
    metrics = trainer.step(make_batch())
    assert metrics["learner/skipped_update"] == 1.0
    assert all(map(torch.equal, before, trainer.policy.model.parameters()))
