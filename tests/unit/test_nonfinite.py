"""A sequence that is not finite leaves the batch: the others train as if it had not been there."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from learners.batch.training_batch import TrainingBatch
from learners.trainer import Trainer
from streamrl.types import TrajectoryGroup
from tests.training import POISON, make_config, make_groups, make_trainer, poison, poisoned

SGD = {"max_grad_norm": None, "weight_decay": 0.0, "eps": 1e-5}


def without(groups: Sequence[TrajectoryGroup], *which: tuple[int, int]) -> list[TrajectoryGroup]:
    return [
        structs.replace(
            group,
            trajectories=tuple(t for m, t in enumerate(group.trajectories) if (g, m) not in which),
        )
        for g, group in enumerate(groups)
    ]


def trainer_with_poison(value: float = torch.nan, **settings: Any) -> Trainer:
    """Whose policy and critic make hidden states of `value` of the token."""
    trainer = make_trainer(
        make_config(learner={"max_tokens_per_micro_batch": 40}, optimizer=SGD, **settings)
    )
    poison(trainer, value)
    return trainer


def gradients(
    trainer: Trainer, step: Callable[[], dict[str, float]]
) -> tuple[Any, dict[str, float]]:
    """Of policy and critic at the update of a step, and the step's metrics."""
    seen: dict[str, torch.Tensor] = {}
    networks = [trainer.policy, *([trainer.critic] if trainer.critic else [])]

    def keep(network: Any) -> None:
        for name, parameter in network.parameters().items():
            if parameter.grad is not None:
                grad = parameter.grad.clone()
                if "embed_tokens" in name or "lm_head" in name:
                    grad[POISON] = 0.0
                seen[f"{type(network).__name__} {name}"] = grad

    optimizers = [trainer.optimizer, *([trainer.critic.optimizer] if trainer.critic else [])]
    for optimizer, network in zip(optimizers, networks, strict=True):
        optimizer.register_step_pre_hook(lambda *_, network=network: keep(network))
    metrics = step()
    return seen, metrics


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert expected
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-6, rtol=1e-4), name


BAD = ((0, 1), (3, 0), (3, 2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_the_gradient_is_that_of_the_batch_without_it(value, mode):
    algorithm = {
        "advantage": "reinforce",
        "loss_config": {"loss_agg_mode": mode},
        "kl_loss": {"coef": 0.1},
        "entropy_coef": 0.01,
    }
    trainer = trainer_with_poison(value, algorithm=algorithm)
    batch = TrainingBatch.of(poisoned(make_groups(), *BAD), 4)
    found, metrics = gradients(trainer, lambda: trainer.step(batch))
    clean = trainer_with_poison(value, algorithm=algorithm)
    smaller = TrainingBatch.of(without(make_groups(), *BAD), 4)
    expected, expected_metrics = gradients(clean, lambda: clean.step(smaller))
    assert_equal(found, expected)
    assert metrics["learner/num_nonfinite_sequences"] == 3.0
    assert expected_metrics["learner/num_nonfinite_sequences"] == 0.0
    assert metrics["learner/skipped_update"] == 0.0
    for name in ("actor/pg_loss", "actor/entropy", "actor/kl_loss"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4), name


@pytest.mark.parametrize("in_reference", [False, True])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"proximal": "recompute"},
        {"proximal": "behavior", "loss": "reinforce"},
        {"proximal": "recompute", "rollout_is": {"second_moment": 1e-3}},
    ],
)
def test_a_correction_over_the_batch_is_that_of_the_batch_without_it(algorithm, in_reference):
    algorithm = {
        "advantage": "reinforce",
        "rollout_is": {"batch_normalize": True},
        "kl_loss": {"coef": 0.1},
        **algorithm,
    }
    value = 0.5 if in_reference else torch.nan
    trainer, clean = (trainer_with_poison(value, algorithm=algorithm) for _ in range(2))
    if in_reference:
        with torch.no_grad():
            trainer._targets.reference.model.get_input_embeddings().weight[POISON] = torch.nan
    batch = TrainingBatch.of(poisoned(make_groups(), *BAD), 4)
    found, metrics = gradients(trainer, lambda: trainer.step(batch))
    smaller = TrainingBatch.of(without(make_groups(), *BAD), 4)
    expected, expected_metrics = gradients(clean, lambda: clean.step(smaller))
    assert_equal(found, expected)
    for name in expected_metrics:
        if name.startswith("mismatch/"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4), name


def test_each_is_logged_with_its_prompt(caplog):
    trainer = trainer_with_poison()
    groups = [structs.replace(g, prompt_index=70 + i) for i, g in enumerate(make_groups())]
    trainer.step(TrainingBatch.of(poisoned(groups, *BAD), 4))
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert sorted(text.split(":")[0] for text in told) == ["prompt 70", "prompt 73", "prompt 73"]


def test_the_parts_of_a_batch_before_it_stay_in_the_gradient():
    algorithm = {"advantage": "reinforce"}
    groups = make_groups()
    trainer = trainer_with_poison(algorithm=algorithm)
    bad = poisoned(groups, *BAD)

    def in_parts() -> dict[str, float]:
        for part in (bad[:1], bad[1:3], bad[3:]):
            trainer.accumulate(TrainingBatch.of(part, 4))
        return trainer.update()

    found, metrics = gradients(trainer, in_parts)
    clean = trainer_with_poison(algorithm=algorithm)
    smaller = TrainingBatch.of(without(groups, *BAD), 4)
    expected, _ = gradients(clean, lambda: clean.step(smaller))
    assert_equal(found, expected)
    assert metrics["learner/num_nonfinite_sequences"] == 3.0


def test_critic_and_kl_in_the_reward_stay_finite():
    algorithm = {
        "advantage": "gae",
        "advantage_config": {"whiten": True},
        "kl_reward": {"coef": 0.1, "controller": "adaptive"},
    }
    trainer = trainer_with_poison(algorithm=algorithm)
    batch = TrainingBatch.of(poisoned(make_groups(), *BAD), 4)
    found, metrics = gradients(trainer, lambda: trainer.step(batch))
    assert {name.split()[0] for name in found} == {"Policy", "Critic"}
    assert all(grad.isfinite().all() for grad in found.values())
    assert metrics["learner/num_nonfinite_sequences"] == 3.0
    assert all(np.isfinite(value) for value in metrics.values())
    assert np.isfinite(trainer.credit.state_dict()["kl_coef"])


def test_a_batch_of_which_none_is_finite_is_skipped():
    trainer = trainer_with_poison()
    every = [(g, m) for g in range(5) for m in range(4)]
    before = [p.detach().clone() for p in trainer.policy.parameters().values()]
    metrics = trainer.step(TrainingBatch.of(poisoned(make_groups(), *every), 4))
    assert metrics["learner/skipped_update"] == 1.0
    after = trainer.policy.parameters().values()
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )


def test_nothing_is_computed_twice_while_all_are_finite():
    trainer = trainer_with_poison(algorithm={"advantage": "grpo"})
    num_passes = 0
    forward = trainer.policy.network.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return forward(*args, **kwargs)

    trainer.policy.network.forward = count
    metrics = trainer.step(TrainingBatch.of(make_groups(), 4))
    assert num_passes == metrics["learner/num_micro_batches"]
