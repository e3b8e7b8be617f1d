"""Rejection, veto and weights reach the gradient under every proximal policy: written by hand."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from learners.batch.training_batch import TrainingBatch
from learners.daemon import _warn_of_truncation
from learners.objective.targets import Targets
from streamrl.algorithms.rollout_is import rollout_is_weights
from streamrl.config.algorithm.rollout_is import RolloutISSettings
from tests.tiny_model import make_llama
from tests.training import make_batch, make_config, make_groups, make_trainer
from tests.unit.test_training import plain_logprobs

VETO = {"rollout_is": {"veto_threshold": 3e-3}}
REJECTION = {"rollout_is": {"rejection": [{"seq_mean_k3": 4.0}, {"token_k1": 30.0}]}}


def gradients(algorithm: dict[str, Any], **learner: Any) -> dict[str, Tensor]:
    """Of the first update, by the trainer, whose micro-batches are small."""
    config = make_config(algorithm=algorithm, learner={"max_tokens_per_micro_batch": 64, **learner})
    trainer = make_trainer(config)
    trainer.accumulate(make_batch())
    return {n: p.grad for n, p in trainer.policy.parameters().items() if p.grad is not None}


def by_hand(loss: Callable[[TrainingBatch, Tensor], Tensor]) -> dict[str, Tensor]:
    """Of a loss of the batch and its log-probabilities [R], under transformers' own forward."""
    model, batch = make_llama(), make_batch()
    loss(batch, torch.cat([plain_logprobs(model, t) for t in batch.trajectories])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-5), name


def grpo(batch: TrainingBatch) -> Tensor:
    """[R]"""
    advantages = [(r - r.mean()) / (r.std() + 1e-6) for r in batch.rewards.split(4)]
    return batch.sequences.expand(torch.cat(advantages))


def ppo(logprobs: Tensor, proximal: Tensor, advantages: Tensor) -> Tensor:
    """[R] the clipped surrogate with dual clip."""
    ratio = (logprobs - proximal).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)


def accepted(batch: TrainingBatch, logprobs: Tensor, correction: dict[str, Any]) -> Tensor:
    """[R] what veto and rejection leave: the definitions, sequence by sequence."""
    keep = []
    log_ratios = (logprobs.detach() - batch.behavior_logprobs).double()
    for d in log_ratios.split(batch.sequences.lengths.tolist()):
        kept = torch.ones_like(d, dtype=torch.bool)
        if threshold := correction.get("veto_threshold"):
            kept &= ~(d.exp() < threshold).any()
        if "rejection" in correction:
            kept &= (d.exp() - 1 - d).mean() <= 4
            kept &= ((-d).exp() <= 30) & ((-d).exp() >= 1 / 30)
        keep.append(kept)
    return torch.cat(keep)


@pytest.mark.parametrize("normalize_by", ["all", "kept"])
@pytest.mark.parametrize("algorithm", [VETO, REJECTION], ids=["veto", "rejection"])
def test_the_ratio_to_the_behavior_policy_is_masked_by_veto_and_rejection(algorithm, normalize_by):
    correction = {**algorithm["rollout_is"], "normalize_by": normalize_by}

    def masked(batch: TrainingBatch, logprobs: Tensor) -> Tensor:
        mask = accepted(batch, logprobs, correction)
        assert 0.2 < mask.float().mean() < 0.8
        loss = ppo(logprobs, batch.behavior_logprobs, grpo(batch))[mask].sum()
        return loss / (mask.sum() if normalize_by == "kept" else len(mask))

    assert_alike(gradients({"proximal": "behavior", "rollout_is": correction}), by_hand(masked))


@pytest.mark.parametrize("normalize_by", ["all", "kept"])
def test_a_mean_by_sequence_counts_the_tokens_that_normalize_by_says(normalize_by):
    rejection = {"rejection": [{"token_k3": 0.5}], "normalize_by": normalize_by}
    section = {"proximal": "behavior", "rollout_is": rejection}
    section["loss_config"] = {"loss_agg_mode": "seq-mean-token-mean"}

    def by_sequence(batch: TrainingBatch, logprobs: Tensor) -> Tensor:
        d = (logprobs.detach() - batch.behavior_logprobs).double()
        keep, lengths = d.exp() - 1 - d <= 0.5, batch.sequences.lengths.tolist()
        loss = torch.where(keep, ppo(logprobs, batch.behavior_logprobs, grpo(batch)), 0.0)
        counts = [int(k.sum()) if normalize_by == "kept" else len(k) for k in keep.split(lengths)]
        means = [one.sum() / max(n, 1) for one, n in zip(loss.split(lengths), counts, strict=True)]
        num_sequences = len(counts) if normalize_by == "all" else sum(n > 0 for n in counts)
        return torch.stack(means).sum() / num_sequences

    assert_alike(gradients(section), by_hand(by_sequence))


@pytest.mark.parametrize("loss", ["ppo", "gspo", "vespo"])
@pytest.mark.parametrize("algorithm", [VETO, REJECTION], ids=["veto", "rejection"])
def test_a_limit_that_masks_nothing_changes_nothing(algorithm, loss):
    """A correction of the whole batch has the denominators of one of each micro-batch."""
    section = {"loss": loss, "proximal": "behavior", "rollout_is": algorithm["rollout_is"]}
    limit = {**algorithm["rollout_is"], "second_moment": 1e9}
    assert_alike(gradients({**section, "rollout_is": limit}), gradients(section))


def test_the_ratio_to_the_behavior_policy_takes_no_weights():
    def unweighted(batch: TrainingBatch, logprobs: Tensor) -> Tensor:
        return ppo(logprobs, batch.behavior_logprobs, grpo(batch)).mean()

    plain = by_hand(unweighted)
    for correction in ({"threshold": 1.5}, {"mode": "clip"}, {"batch_normalize": True}):
        assert_alike(gradients({"proximal": "behavior", "rollout_is": correction}), plain)


def test_nearly_everything_vetoed_leaves_nearly_nothing():
    """And what is vetoed is not in the denominator's way: the metric says how much is left."""
    section = {"proximal": "behavior", "rollout_is": {"veto_threshold": 0.9}}
    trainer = make_trainer(make_config(algorithm=section))
    metrics = trainer.step(make_batch())
    assert metrics["mismatch/rollout_is_veto_fraction"] >= 0.9
    assert 0 < metrics["actor/trained_token_frac"] < 0.1


@pytest.mark.parametrize("section", [{"apply": False}, {"threshold": None}])
def test_a_veto_that_is_not_applied_masks_nothing(section):
    rejection = [{"token_k1": 1e9}]
    correction = {"veto_threshold": 0.9, "rejection": rejection, **section}
    if section == {"threshold": None}:
        del correction["veto_threshold"]
    trainer = make_trainer(
        make_config(algorithm={"proximal": "behavior", "rollout_is": correction})
    )
    assert trainer.step(make_batch())["actor/trained_token_frac"] == 1


LOGLINEAR = [
    {"rollout_is": {"batch_normalize": True}},
    {"rollout_is": {"mode": "clip", "threshold": 10.0, "normalize_by": "kept"}},
    {"kl_reward": {"coef": 1e-12}},
    {},
]


@pytest.mark.parametrize("algorithm", LOGLINEAR, ids=str)
def test_loglinear_weighs_the_proximal_policy_against_the_behavior_policy(algorithm):
    correction = algorithm.get("rollout_is", {})

    def decoupled(batch: TrainingBatch, logprobs: Tensor) -> Tensor:
        behavior, lag = batch.behavior_logprobs, batch.staleness.float()
        proximal = behavior + lag / (lag + 1) * (logprobs.detach() - behavior)
        weights = (proximal - behavior).exp()
        kept = torch.ones_like(weights, dtype=torch.bool)
        if correction.get("mode") == "clip":
            kept = (weights >= 0.1) & (weights <= 10)
            assert 0.2 < kept.float().mean() < 0.9
        weights = weights.clamp(max=correction.get("threshold", 2))
        if correction.get("batch_normalize"):
            weights = weights / weights.mean()
        loss = weights * ppo(logprobs, proximal, grpo(batch))
        return loss[kept].sum() / kept.sum()

    assert_alike(gradients({"proximal": "loglinear", **algorithm}), by_hand(decoupled))


def test_vetoed_tokens_are_not_accepted_and_clipped_ones_are():
    batch = make_batch()
    train = batch.behavior_logprobs + torch.linspace(-3, 3, batch.sequences.num_tokens)
    found = {
        veto: rollout_is_weights(
            train,
            batch.behavior_logprobs,
            batch.sequences,
            RolloutISSettings(mode="clip", veto_threshold=veto),
        )
        for veto in (None, 0.1)
    }
    assert bool(found[None].accepted.all())
    assert bool((found[None].weights == 0).any())
    assert bool(found[0.1].keep.all())
    vetoed = batch.sequences.sum((train - batch.behavior_logprobs).exp() < 0.1) > 0
    assert torch.equal(found[0.1].accepted, batch.sequences.expand(~vetoed))


@pytest.mark.parametrize(
    ("setting", "value"), [("min_new_tokens", 3), ("top_p", 0.9), ("top_k", 20)]
)
def test_what_cuts_the_sampled_distribution_is_warned_of(caplog, setting, value):
    config = make_config(generator={setting: value})
    _warn_of_truncation(config.generator)
    (message,) = caplog.messages
    assert message.startswith(f"generator.{setting} {value:g} cuts off the sampled distribution")
    _warn_of_truncation(make_config().generator)
    assert len(caplog.messages) == 1


def test_a_token_that_is_newer_than_the_learner_is_as_stale_as_an_older_one():
    batch = TrainingBatch.of(make_groups(), policy_version=0)
    assert batch.policy_versions.max() > 0
    assert torch.equal(batch.staleness, batch.policy_versions)


def test_tokens_that_are_left_out_of_the_loss_have_no_advantage_to_correct_by():
    columns = dict.fromkeys(field.name for field in fields(Targets))
    given = {"advantages": torch.tensor([1.0, 2.0]), "loss_mask": torch.tensor([True, False])}
    assert Targets(**{**columns, **given}).trained_advantages.tolist() == [1.0, 0.0]
