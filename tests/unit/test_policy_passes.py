"""The pass before the loss: one micro-batch is computed once, with the same numbers."""

from typing import Any

import pytest
import torch

from learners.trainer import Trainer
from streamrl.config import RunConfig
from tests.training import make_batch, make_config, make_trainer

SETTINGS: tuple[dict[str, Any], ...] = (
    {"algorithm": {"preset": "stream"}},
    {"algorithm": {"rollout_is": "m2po"}},
    {"algorithm": {"advantage": "grpo", "kl_reward": {"coef": 0.1}}},
)
ONE, SEVERAL = 10_000, 64


def config_of(settings: dict[str, Any], limit: int, **learner: Any) -> RunConfig:
    optimizer = {"lr": 0.01, "max_grad_norm": None}
    learner = {"max_tokens_per_micro_batch": limit, **learner}
    return make_config(optimizer=optimizer, learner=learner, **settings)


def counted_step(config: RunConfig) -> tuple[Trainer, list[bool], dict[str, float]]:
    """A trainer after a step, whether each pass of its policy had a gradient, and the metrics."""
    trainer = make_trainer(config)
    passes: list[bool] = []
    network = trainer.policy.network
    network.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    return trainer, passes, trainer.step(make_batch(num_groups=6))


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_micro_batch_is_computed_once(settings: dict[str, Any]):
    _, passes, metrics = counted_step(config_of(settings, ONE))
    assert metrics["learner/num_micro_batches"] == 1
    assert passes == [True]


@pytest.mark.parametrize("settings", SETTINGS)
def test_of_several_micro_batches_the_first_is_computed_once(settings: dict[str, Any]):
    _, passes, metrics = counted_step(config_of(settings, SEVERAL))
    count = int(metrics["learner/num_micro_batches"])
    assert count > 1
    assert passes == [False] * (count - 1) + [True] * count


def test_a_pass_with_dropout_is_for_the_gradient_alone():
    lora = {"rank": 4, "alpha": 8, "dropout": 0.5}
    _, passes, metrics = counted_step(config_of(SETTINGS[0], ONE, lora=lora))
    assert metrics["learner/num_micro_batches"] == 1
    assert passes == [False, True]


@pytest.mark.parametrize("limit", [ONE, SEVERAL])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_step_is_that_of_separate_passes(settings: dict[str, Any], limit: int):
    own = {"max_tokens_per_forward_pass": {"proximal": limit}}
    trainer, passes, metrics = counted_step(config_of(settings, limit))
    other, other_passes, expected = counted_step(config_of(settings, limit, **own))
    assert len(other_passes) == len(passes) + 1
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(parameter, other.policy.parameters()[name]), name
    timed = {name for name in expected if name.endswith("_s") or "flops" in name}
    for name in expected.keys() - timed:
        assert metrics[name] == pytest.approx(expected[name], nan_ok=True), name


def test_parts_and_mini_batches_keep_no_graph_of_another_batch():
    config = config_of(SETTINGS[0], ONE)
    trainer, passes, _ = counted_step(config)
    passes.clear()
    for part in (make_batch(seed=1, num_groups=2), make_batch(seed=2, num_groups=3)):
        trainer.accumulate(part)
    trainer.discard()
    trainer.step(make_batch(seed=3, num_groups=4))
    assert passes == [True] * 3
    _, passes, _ = counted_step(config_of({"algorithm": {"advantage": "opob"}}, ONE, epochs=2))
    assert passes == [True] * 2
    halves = {"updates_per_batch": 2}
    _, passes, _ = counted_step(config_of({"algorithm": {"advantage": "opob"}}, ONE, **halves))
    assert passes == [False, True, True]
