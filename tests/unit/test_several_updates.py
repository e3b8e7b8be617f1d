"""Several updates a batch: the steps of PPO, by mini-batches that a resume repeats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.make_model import make_tokenizer
from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.restore import restore
from learners.checkpoints.writer import CheckpointWriter
from learners.objective import step_metrics
from learners.objective.credit import mini_batches
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import read_checkpoint
from streamrl.checkpoints.history import new_history
from streamrl.config import RunConfig
from streamrl.types import Books, Trajectory, replace
from tests.tiny_model import make_llama, save_llama
from tests.training import make_batch, make_config, make_groups, make_policy, make_trainer
from tests.unit.test_correction import grpo, ppo
from tests.unit.test_training import plain_logprobs

LR = 0.01


def several(updates: int = 2, epochs: int = 1, **sections: Any) -> RunConfig:
    learner = {"updates_per_batch": updates, "epochs": epochs, "max_tokens_per_micro_batch": 64}
    optimizer = {"lr": LR, "max_grad_norm": None, "weight_decay": 0.0, "eps": 1e-5}
    return make_config(
        learner={**learner, **sections.pop("learner", {})},
        optimizer=optimizer,
        **sections,
    )


def groups_of(batch: TrainingBatch, config: RunConfig) -> list[list[int]]:
    """The groups of each update; whole ones."""
    updates = mini_batches(batch, config.learner, config.run.seed)
    found = [sorted({int(batch.group_indices[i]) for i in chosen}) for chosen in updates]
    for chosen, groups in zip(updates, found, strict=True):
        assert chosen == [i for i, g in enumerate(batch.group_indices.tolist()) if g in groups]
    return found


def test_every_epoch_trains_every_group_once_in_another_order():
    batch = make_batch(num_groups=20)
    updates = groups_of(batch, several(updates=3, epochs=2))
    assert [len(groups) for groups in updates] == [7, 7, 6] * 2
    for epoch in (updates[:3], updates[3:]):
        assert sorted(group for groups in epoch for group in groups) == list(range(20))
    assert updates[:3] != updates[3:]


def test_the_mini_batches_depend_on_seed_and_version_alone():
    groups, config = make_groups(num_groups=20), several(updates=4)
    updates = groups_of(TrainingBatch.of(groups, 4), config)
    assert groups_of(TrainingBatch.of(groups, 5), config) != updates
    other_seed = several(updates=4, run={"seed": 1})
    assert groups_of(TrainingBatch.of(groups, 4), other_seed) != updates
    torch.manual_seed(99)
    np.random.seed(99)
    assert groups_of(make_batch(num_groups=20), config) == updates


def test_one_update_takes_the_batch_as_it_is():
    batch = make_batch()
    config = make_config()
    assert mini_batches(batch, config.learner, config.run.seed) == [list(range(len(batch.lengths)))]


def test_more_updates_than_groups_are_refused():
    with pytest.raises(ValueError, match=r"learner\.updates_per_batch 3 is more than"):
        several(updates=3, learner={"groups_per_step": 2})


def test_what_is_resampled_is_trained_with_its_group():
    batch, config = make_batch(), several(updates=2)
    first, second = groups_of(batch, config)
    chosen = [19, 3, 3, 0, 7]
    updates = mini_batches(batch, config.learner, config.run.seed, chosen)
    groups = [[int(batch.group_indices[i]) for i in update] for update in updates]
    assert sorted(i for update in updates for i in update) == sorted(chosen)
    assert all(set(g) <= set(first) or set(g) <= set(second) for g in groups)


def ppo_by_hand(batch: TrainingBatch, config: RunConfig, updates: int) -> Iterator[Tensor]:
    """PPO as in its paper and in verl: fixed old log-probabilities and weights, advantages of the
    batch, token mean of the mini-batch. Yields all weights after each step of Adam."""
    model = make_llama()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0
    )
    advantages = grpo(batch)
    with torch.no_grad():
        old = torch.cat([plain_logprobs(model, t) for t in batch.trajectories])
    weights = (old - batch.behavior_logprobs).exp().clamp(max=2)
    for chosen in mini_batches(batch, config.learner, config.run.seed)[:updates]:
        rows = batch.rows(chosen)
        logprobs = torch.cat([plain_logprobs(model, batch.trajectories[i]) for i in chosen])
        loss = (weights[rows] * ppo(logprobs, old[rows], advantages[rows])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield torch.cat([p.detach().flatten() for p in model.parameters()])


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters().values()])


@pytest.mark.parametrize(("updates", "epochs"), [(2, 1), (1, 2), (3, 2)])
def test_the_updates_are_those_of_ppo_with_fixed_proximal_logprobs(updates, epochs):
    batch, config = make_batch(), several(updates, epochs, algorithm={"loss": "ppo"})
    trainer = make_trainer(config)
    metrics = trainer.step(batch)
    *_, expected = ppo_by_hand(batch, config, updates * epochs)
    assert torch.allclose(weights_of(trainer), expected, rtol=0, atol=3e-5)
    assert metrics["learner/num_updates"] == updates * epochs
    assert metrics["actor/pg_clipfrac"] > 0
    assert abs(metrics["actor/ppo_kl"]) > 1e-4


def test_advantages_and_weights_are_of_the_whole_batch():
    """Normalized over it: the weights of a mini-batch then do not average 1."""
    section = {"rollout_is": {"batch_normalize": True}, "advantage_config": {"whiten": True}}
    trainer = make_trainer(several(updates=2, algorithm=section))
    batch = make_batch()
    old = trainer.logprobs(batch)
    weights = (old - batch.behavior_logprobs).exp().clamp(max=2)
    metrics = trainer.step(batch)
    mean = metrics["mismatch/rollout_is_batch_norm_factor"]
    assert mean == pytest.approx(float(weights.mean()), rel=1e-4)
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-5)


ALGORITHMS = [
    {},
    {"proximal": "behavior"},
    {"proximal": "behavior", "loss": "reinforce", "rollout_is": {"batch_normalize": True}},
    {"proximal": "behavior", "rollout_is": {"rejection": [{"token_k1": 3}]}},
    {"proximal": "loglinear", "rollout_is": {"mode": "clip", "normalize_by": "kept"}},
    {"rollout_is": {"mode": "clip", "normalize_by": "kept"}, "entropy_coef": 0.1},
    {"kl_loss": {"coef": 0.3}, "kl_reward": {"coef": 0.1}},
    {"advantage": "gae", "value": {"clip_range": 0.2}, "reward": {"difficulty_high": 0.6}},
    {"loss": "gspo"},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_updates_do_not_depend_on_how_their_mini_batches_are_cut(algorithm):
    whole, cut = (
        make_trainer(several(2, 2, algorithm=algorithm, learner=learner))
        for learner in ({"max_tokens_per_micro_batch": 10_000}, {"max_tokens_per_micro_batch": 24})
    )
    of_whole, of_cut = whole.step(make_batch()), cut.step(make_batch())
    assert torch.allclose(weights_of(whole), weights_of(cut), rtol=0, atol=2e-4)
    assert of_whole["learner/num_micro_batches"] == 4
    assert of_cut["learner/num_micro_batches"] > 16
    for name, value in of_whole.items():
        if name.startswith(("actor/", "critic/", "reward/")):
            assert of_cut[name] == pytest.approx(value, rel=2e-2, abs=2e-3), name


def test_the_critic_is_updated_as_often_as_the_policy():
    trainer = make_trainer(several(3, 2, algorithm={"advantage": "gae"}))
    assert trainer.critic is not None
    trainer.step(make_batch())
    for optimizer in (trainer.optimizer, trainer.critic.optimizer):
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert steps == {6}


def test_the_learning_rate_is_that_of_the_version():
    config = several(3, 2, run={"max_steps": 10}, algorithm={"rollout_is": "token_is"})
    schedule = config.learner.optimizer.model_copy(
        update={"schedule": "linear", "warmup_steps": 8, "lr": 1.0}
    )
    learner = config.learner.model_copy(update={"optimizer": schedule})
    trainer = Trainer(config.model_copy(update={"learner": learner}), make_policy())
    assert trainer.step(make_batch())["learner/lr"] == pytest.approx(5 / 8)


def test_a_batch_with_several_updates_is_taken_as_a_whole():
    trainer = make_trainer(several(2))
    trainer.accumulate(make_batch())
    with pytest.raises(ValueError, match="takes a batch as a whole"):
        trainer.accumulate(make_batch(1))


def state(trainer: Trainer) -> list[Tensor]:
    """Of the policy, the critic and their optimizers."""
    optimizers = [trainer.optimizer, *([trainer.critic.optimizer] if trainer.critic else [])]
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    moments = [v for o in optimizers for s in o.state.values() for v in s.values()]
    return [tensor.detach().clone() for tensor in (*parameters, *moments)]


def certain(trajectory: Trajectory) -> Trajectory:
    """As sampled by a policy that is sure of every token: all ratios to it are small."""
    return replace(trajectory, behavior_logprobs=np.zeros_like(trajectory.behavior_logprobs))


MASKED = [
    {"reward": {"difficulty_low": 100.0}},
    {"reward": {"difficulty_low": 100.0}, "advantage": "gae"},
    {"reward": {"difficulty_low": 100.0}, "entropy_coef": 0.1},
    {"rollout_is": {"veto_threshold": 0.1, "threshold": 2.0}},
    {"rollout_is": {"rejection": [{"token_k1": "0.5_2"}]}},
    {"rollout_is": {"rejection": [{"token_k1": "0.5_2"}], "normalize_by": "kept"}},
    {"rollout_is": {"veto_threshold": 0.1}, "proximal": "behavior"},
]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("algorithm", MASKED, ids=str)
def test_a_batch_without_a_token_to_train_changes_nothing(algorithm, epochs):
    trainer = make_trainer(several(1, epochs, algorithm=algorithm))
    first = several(1, 1, algorithm={"advantage": algorithm.get("advantage", "grpo")})
    before_first = state(trainer)
    groups = [replace(g, trajectories=tuple(map(certain, g.trajectories))) for g in make_groups()]
    masked = TrainingBatch.of(groups, policy_version=4)
    metrics = trainer.step(masked)
    assert metrics["learner/num_masked_updates"] == epochs
    assert metrics["learner/num_updates"] == 0
    assert len(state(trainer)) == len(before_first), "moments were made"
    # With moments of an update before, which decay with every step that is made.
    other = make_trainer(first)
    other.step(make_batch())
    trainer.optimizer.load_state_dict(other.optimizer.state_dict())
    before = state(trainer)
    trainer.step(masked)
    assert all(map(torch.equal, before, state(trainer)))


def test_a_masked_mini_batch_is_in_no_mean():
    """Of two groups one is too hard: its update is not made, the other's metrics are the step's."""
    groups = make_groups(num_groups=2)
    low, high = sorted(sum(t.reward for t in g.trajectories) / 4 for g in groups)
    section = {"reward": {"difficulty_low": (low + high) / 2}}
    trainer = make_trainer(several(2, algorithm=section))
    metrics = trainer.step(TrainingBatch.of(groups, policy_version=4))
    assert metrics["learner/num_updates"] == 1
    assert metrics["learner/num_masked_updates"] == 1
    assert metrics["actor/entropy"] > 1
    assert {int(s["step"]) for s in trainer.optimizer.state.values()} == {1}


def test_sum_norm_divides_by_the_same_number_whatever_the_batch():
    """By `generator.max_new_tokens`: here 10, where the longest response has more tokens."""
    mode = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    batch = make_batch()
    assert batch.sequences.longest == 11
    losses = []
    for numbers in (mode, {**mode, "loss_scale_factor": 10}, {**mode, "loss_scale_factor": 11}):
        trainer = make_trainer(make_config(algorithm={"loss_config": numbers}))
        losses.append(trainer.step(batch)["actor/pg_loss"])
    assert losses[0] == losses[1] != losses[2]
    values = []
    for numbers in ({}, {"loss_scale_factor": 10}, {"loss_scale_factor": 11}):
        section = {"advantage": "gae", "value": mode, "loss_config": numbers}
        values.append(make_trainer(make_config(algorithm=section)).step(batch)["critic/vf_loss"])
    assert values[0] == values[1] != values[2]


def make_run(folder: Path) -> RunConfig:
    section = {"advantage": "gae", "proximal": "recompute"}
    paths = {"model": {"path": str(folder / "model")}, "run": {"folder": folder, "name": "run"}}
    return several(3, 2, algorithm=section, learner={"device": "cpu"}, **paths)


def new_trainer(config: RunConfig) -> Trainer:
    return Trainer(config, Policy.from_config(config), critic=Critic.from_config(config))


class Killed(Exception):
    pass


def test_a_learner_that_is_killed_between_updates_repeats_them(tmp_path):
    """After the second of six updates: the step is made again, bit for bit."""
    save_llama(tmp_path / "model")
    make_tokenizer("abc").save_pretrained(tmp_path / "model")
    config = make_run(tmp_path)
    killed, writer, made = new_trainer(config), CheckpointWriter(config, new_history()), []
    killed.step(make_batch(0, num_groups=12))
    path = writer.save(killed, LearnerState(5, Books())).result()
    writer.close()

    def kill(*_: object) -> None:
        made.append("updated")
        if len(made) == 2:
            raise Killed

    killed.optimizer.register_step_post_hook(kill)
    with pytest.raises(Killed):
        killed.step(make_batch(1, num_groups=12))
    uninterrupted = new_trainer(config)
    for seed in range(2):
        metrics = uninterrupted.step(make_batch(seed, num_groups=12))
    resumed = new_trainer(config)
    assert restore(read_checkpoint(path), config, resumed).policy_version == 5
    repeated = resumed.step(make_batch(1, num_groups=12))
    assert torch.equal(weights_of(resumed), weights_of(uninterrupted))
    for name in metrics:
        if name.startswith(("actor/", "critic/", "mismatch/")):
            assert repeated[name] == metrics[name], name


def test_of_the_updates_of_a_step_extremes_are_extremes_and_shares_are_means():
    share = "mismatch/rollout_rs_seq_max_k3_masked_fraction"
    deviation = "mismatch/rollout_is_seq_max_deviation"
    largest, smallest = "mismatch/rollout_is_max", "mismatch/rollout_is_min"
    updates = [
        {step_metrics.MASKED: 0.0, share: 0.0, deviation: 1.0, largest: 2.0, smallest: 0.5},
        {step_metrics.MASKED: 0.0, share: 0.5, deviation: 3.0, largest: 4.0, smallest: 0.25},
    ]
    metrics = step_metrics.of_updates(updates)
    assert metrics[share] == 0.25
    assert (metrics[deviation], metrics[largest], metrics[smallest]) == (3.0, 4.0, 0.25)


def test_the_mean_of_a_step_leaves_out_updates_that_were_skipped():
    made = {step_metrics.MASKED: 0.0, "learner/skipped_update": 0.0}
    updates = [
        {**made, "learner/grad_norm": 3.0, "critic/grad_norm": 1.0},
        {**made, "learner/skipped_update": 1.0, "learner/grad_norm": -1.0, "critic/grad_norm": 2.0},
    ]
    metrics = step_metrics.of_updates(updates)
    assert metrics["learner/grad_norm"] == 3.0
    assert metrics["critic/grad_norm"] == 1.5
    assert metrics["learner/skipped_update"] == 1.0
    assert metrics["learner/num_updates"] == 1
    assert step_metrics.of_updates(updates[1:])["learner/grad_norm"] == -1.0


def test_a_metric_that_only_an_update_without_a_trained_token_has_is_kept():
    kl = "mismatch/staleness_0/kl"
    updates = [{step_metrics.MASKED: 1.0, kl: 0.5, "x": 1.0}, {step_metrics.MASKED: 0.0, "x": 3.0}]
    metrics = step_metrics.of_updates(updates)
    assert (metrics[kl], metrics["x"], metrics["learner/num_updates"]) == (0.5, 3.0, 1)
