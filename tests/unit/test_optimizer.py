"""AdamW's rate over the steps, its parameter groups, and updates that are skipped."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import LRScheduler
from transformers import optimization as theirs

from learners.optimizer import (
    SkippedUpdates,
    by_mesh,
    clip_gradients,
    learning_rate,
    make_optimizer,
)
from learners.trainer import Trainer
from streamrl.config.learner import OptimizerSettings
from streamrl.errors import ConfigError, DivergedError
from tests.training import make_batch, make_config, make_critic, make_policy

STEPS = 40
WARMUP = {"num_warmup_steps": 8}
TO_THE_END = {**WARMUP, "num_training_steps": STEPS}


def rates_of(make: Callable[..., LRScheduler], arguments: dict[str, Any]) -> list[float]:
    """From the end of the warm-up to the step after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, **arguments)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(STEPS + 1):
            rates.append(schedule.get_last_lr()[0])
            schedule.step()
    return rates[8:]


@pytest.mark.parametrize(
    ("settings", "make", "arguments"),
    [
        ({}, theirs.get_constant_schedule_with_warmup, WARMUP),
        ({"schedule": "linear"}, theirs.get_linear_schedule_with_warmup, TO_THE_END),
        (
            {"schedule": "linear", "min_lr_ratio": 0.25},
            theirs.get_polynomial_decay_schedule_with_warmup,
            {**TO_THE_END, "lr_end": 0.25},
        ),
        ({"schedule": "cosine"}, theirs.get_cosine_schedule_with_warmup, TO_THE_END),
        (
            {"schedule": "cosine", "num_cycles": 1.5},
            theirs.get_cosine_schedule_with_warmup,
            {**TO_THE_END, "num_cycles": 1.5},
        ),
        (
            {"schedule": "cosine", "num_cycles": 2, "min_lr_ratio": 0.1},
            theirs.get_cosine_with_min_lr_schedule_with_warmup,
            {**TO_THE_END, "num_cycles": 2, "min_lr_rate": 0.1},
        ),
        *(
            (
                {
                    "schedule": "warmup_stable_decay",
                    "decay_ratio": 0.3,
                    "decay_shape": shape,
                    "min_lr_ratio": 0.1,
                },
                theirs.get_wsd_schedule,
                {**TO_THE_END, "num_decay_steps": 12, "decay_type": shape, "min_lr_ratio": 0.1},
            )
            for shape in ("linear", "cosine", "1-sqrt")
        ),
    ],
)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 8}, {"warmup_ratio": 0.2}])
def test_a_schedule_is_that_of_transformers(settings, make, arguments, warmup):
    ours = OptimizerSettings(lr=1.0, **settings, **warmup)
    rates = [learning_rate(step, ours, STEPS) for step in range(STEPS + 1)]
    assert rates[:8] == pytest.approx([(step + 1) / 8 for step in range(8)])
    assert rates[8:] == pytest.approx(rates_of(make, arguments), abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"warmup_steps": 3, "warmup_ratio": 0.1},
            "warmup_ratio: was 0.1 beside warmup_steps 3; give one of the two",
        ),
        (
            {"min_lr_ratio": 0.1},
            "min_lr_ratio: was 0.1, which does nothing under schedule constant; it acts under "
            "linear, cosine, warmup_stable_decay",
        ),
        ({"schedule": "linear", "num_cycles": 2}, "num_cycles: was 2.0, which does nothing"),
        ({"schedule": "cosine", "decay_ratio": 0.1}, "it acts under warmup_stable_decay"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        OptimizerSettings(**settings)


def test_a_decay_that_begins_within_the_warm_up_is_refused():
    optimizer = {"schedule": "warmup_stable_decay", "decay_ratio": 0.6, "warmup_ratio": 0.5}
    with pytest.raises(ValueError, match="50 steps of warm-up and 60 of decay are more than"):
        make_config(optimizer=optimizer)


def test_vectors_are_not_decayed():
    optimizer = make_optimizer(make_policy().parameters(), OptimizerSettings(weight_decay=0.1))
    decay = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {2: 0.1, 1: 0.0}
    assert all(g["fused"] for g in optimizer.param_groups)


def test_a_group_has_its_own_rate_and_decay_under_the_same_schedule():
    config = make_config(
        optimizer={
            "weight_decay": 0.1,
            "warmup_steps": 8,
            "groups": [
                {"parameters": "*.mlp.*", "lr": 2e-3},
                {"parameters": "model.embed_tokens.*", "lr": 0, "weight_decay": 0.5},
                {"parameters": "*norm.weight", "weight_decay": 0.3},
                {"parameters": "*.weight", "weight_decay": 0.2},
            ],
        },
        algorithm={"rollout_is": "token_is"},
    )
    trainer = Trainer(config, make_policy())
    names = {id(p): name for name, p in trainer.policy.parameters().items()}
    before = {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}
    trainer.step(make_batch())
    found = {
        names[id(p)]: (pytest.approx(group["lr"]), group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    }
    # Version 4 is the fifth step of a warm-up over eight.
    assert found["model.layers.0.mlp.up_proj.weight"] == (2e-3 * 5 / 8, 0.1)
    assert found["model.embed_tokens.weight"] == (0.0, 0.5)
    assert found["model.norm.weight"] == (1e-3 * 5 / 8, 0.3)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (1e-3 * 5 / 8, 0.2)
    unchanged = {n for n, p in trainer.policy.parameters().items() if torch.equal(p, before[n])}
    assert unchanged == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (
            ["*.mlpp.*"],
            r"groups.0.parameters: was '\*.mlpp.\*', which matches no .* mlp",
        ),
        (["model.nrom.weight"], "matches no parameter; did you mean 'model.norm.weight'"),
        (["*", "model.norm.weight"], r"groups.1.*, whose parameters earlier groups have; put it"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(patterns, sentence):
    groups = [{"parameters": pattern, "lr": i} for i, pattern in enumerate(patterns)]
    settings = OptimizerSettings.model_validate({"groups": groups})
    with pytest.raises(ConfigError, match=sentence):
        make_optimizer(make_policy().parameters(), settings)


def test_the_critic_has_no_groups():
    groups = [{"parameters": "*.mlp.*", "lr": 0.5}]
    config = make_config(optimizer={"groups": groups}, algorithm={"advantage": "gae"})
    critic = make_critic(config)
    critic.update(4)
    assert {group["lr"] for group in critic.optimizer.param_groups} == {1e-3}


def test_the_critic_has_an_optimizer_of_its_own():
    own = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.25, "max_grad_norm": 3.0}
    config = make_config(algorithm={"advantage": "gae", "value": own})
    critic = make_critic(config)
    critic.update(4)
    groups = critic.optimizer.param_groups
    assert {(group["lr"], group["betas"], group["eps"]) for group in groups} == {
        (0.5, (0.8, 0.9), 1e-6)
    }
    assert {group["weight_decay"] for group in groups} == {0.0, 0.25}
    assert config.critic_optimizer.max_grad_norm == 3.0
    assert config.learner.optimizer.max_grad_norm == 1.0
    plain = make_config(algorithm={"advantage": "gae"})
    assert plain.critic_optimizer == plain.learner.optimizer


def test_a_critic_of_which_a_step_leaves_nothing_is_refused():
    with pytest.raises(ValidationError, match=r"algorithm\.value\.weight_decay: the critic has 4"):
        make_config(algorithm={"advantage": "gae", "value": {"lr": 0.5, "weight_decay": 4.0}})


def test_the_norms_of_several_meshes_stay_on_their_device():
    """The host has no number before the whole norm: that one alone has none here."""
    parameters = [torch.nn.Parameter(torch.ones(2, device="meta")) for _ in range(2)]
    for mesh, parameter in enumerate(parameters):
        parameter.grad, parameter.device_mesh = torch.ones_like(parameter), mesh
    assert len(by_mesh(parameters)) == 2
    with pytest.raises(RuntimeError, match=r"item\(\)"):
        clip_gradients(parameters, None)


def test_skipped_updates_in_a_row_end_the_training(caplog):
    trainer = Trainer(make_config(optimizer={"max_skipped_updates": 2}), make_policy())
    head = trainer.policy.model.get_output_embeddings().weight
    with torch.no_grad():
        head[5, 0] = torch.nan
    for _ in range(2):
        assert trainer.step(make_batch())["learner/skipped_update"] == 1.0
    assert "step 5 is not finite: its update is skipped, 2 in a row" in caplog.text
    with pytest.raises(DivergedError, match=r"3 updates in a row .*_updates is 2; lower"):
        trainer.step(make_batch())


def test_an_update_that_is_made_ends_the_count():
    skipped = SkippedUpdates(1)
    for _ in range(3):
        skipped.count({"learner/skipped_update": 1.0}, 0)
        skipped.count({"learner/skipped_update": 0.0, "critic/skipped_update": 0.0}, 0)
    skipped.count({"learner/skipped_update": 0.0, "critic/skipped_update": 1.0}, 0)
    with pytest.raises(DivergedError):
        skipped.count({"learner/skipped_update": 1.0}, 0)
