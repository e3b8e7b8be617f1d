"""A number of a loss changes the gradient, or it is refused with what would make it act."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from learners.batch.training_batch import TrainingBatch
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.algorithm.losses import LOSS_SETTINGS, RATIO_SETTINGS, SEQUENCE_MEAN_LOSSES
from streamrl.errors import ConfigError
from streamrl.types import replace
from tests.training import make_config, make_groups, make_trainer

TWO_VALUES: dict[str, tuple[Any, Any]] = {
    "loss_agg_mode": ("token-mean", "token-sum"),
    "loss_scale_factor": (8.0, 64.0),
    "norm_by_sequences": (True, False),
    "clip_ratio_low": (1e-6, 0.9),
    "clip_ratio_high": (1e-6, 0.9),
    "clip_ratio_c": (1.000001, 50.0),
    "tau_pos": (0.5, 5.0),
    "tau_neg": (0.5, 5.0),
    "k_pos": (0.5, 2.0),
    "lambda_pos": (0.5, 2.0),
    "k_neg": (0.5, 2.0),
    "lambda_neg": (0.5, 2.0),
    "clip_cov_ratio": (0.01, 1.0),
    "clip_cov_lb": (-10.0, 0.0),
    "clip_cov_ub": (0.0, 5.0),
    "kl_cov_ratio": (0.01, 1.0),
    "kl_cov_coef": (0.1, 5.0),
    "topr_positive_weight": (0.5, 1.0),
    "topr_negative_weight": (0.5, 1.0),
    "dro_beta": (0.5, 5.0),
    "dro_level": ("token", "sequence"),
    "log_ratio_coef": (0.5, 5.0),
}
# Acts on recorded candidates, which this batch has not: see test_sampling_mask.
APART = "divergence_topk"
FIELDS = [
    (loss, field)
    for loss, record in LOSS_SETTINGS.items()
    for field in record.model_fields
    if field != APART
]
SOME_TOKENS = {"clip_cov": {"clip_cov_lb": -10.0, "clip_cov_ratio": 0.3}}
"""Numbers with which the tiny batch has tokens to choose among."""


def batch() -> TrainingBatch:
    """With positive and negative rewards."""
    groups = [
        replace(g, trajectories=tuple(replace(t, reward=t.reward - 0.5) for t in g.trajectories))
        for g in make_groups(num_groups=12)
    ]
    return TrainingBatch.of(groups, policy_version=4)


def run_config(loss: str, learner: Mapping[str, Any], **algorithm: Any) -> RunConfig:
    optimizer = {"lr": 0.02, "max_grad_norm": None}
    section = {"loss": loss, **algorithm}
    return make_config(algorithm=section, learner={**learner}, optimizer=optimizer)


def with_number(config: RunConfig, field: str, value: Any) -> RunConfig:
    """As if it were not refused."""
    numbers = config.algorithm.loss_config.model_copy(update={field: value})
    algorithm = config.algorithm.model_copy(update={"loss_config": numbers})
    return config.model_copy(update={"algorithm": algorithm})


def weights_after(config: RunConfig) -> torch.Tensor:
    """All of them, after the updates of one batch."""
    trainer = make_trainer(config)
    torch.manual_seed(1)
    trainer.step(batch())
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters().values()])


def gradient(config: RunConfig) -> torch.Tensor:
    """Of the first update."""
    trainer = make_trainer(config)
    torch.manual_seed(1)
    trainer.accumulate(batch())
    parameters = trainer.policy.parameters().values()
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def is_refused(loss: str, field: str, value: Any, learner: Mapping[str, Any], **rest: Any) -> bool:
    numbers = {**rest.pop("loss_config", {}), field: value}
    try:
        run_config(loss, learner, loss_config=numbers, **rest)
    except ValidationError as error:
        (detail,) = error.errors()
        assert detail["loc"] == ("algorithm", "loss_config", field)
        assert "cannot act; set " in detail["msg"]
        return True
    return False


@pytest.mark.parametrize(("loss", "field"), FIELDS)
def test_a_number_changes_the_gradient_or_is_refused(loss, field):
    plain = run_config(loss, {})
    for name, value in SOME_TOKENS.get(loss, {}).items():
        plain = with_number(plain, name, value)
    one, other = (gradient(with_number(plain, field, value)) for value in TWO_VALUES[field])
    acts = not torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    for value in TWO_VALUES[field]:
        assert is_refused(loss, field, value, {}) != acts


@pytest.mark.parametrize(("loss", "field"), FIELDS)
def test_a_number_acts_where_the_refusal_says_that_it_does(loss, field):
    learner: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    if field in RATIO_SETTINGS:
        learner["updates_per_batch"] = 2
    if field in ("loss_scale_factor", "norm_by_sequences"):
        rest["loss_config"] = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    if loss in SEQUENCE_MEAN_LOSSES and field not in RATIO_SETTINGS:
        rest["entropy_coef"] = 0.5
    assert not any(is_refused(loss, field, v, learner, **rest) for v in TWO_VALUES[field])
    numbers = {**SOME_TOKENS.get(loss, {}), **rest.pop("loss_config", {})}
    one, other = (
        # Adam's first step loses the scale of a gradient.
        (gradient if field not in RATIO_SETTINGS else weights_after)(
            run_config(loss, learner, loss_config={**numbers, field: value}, **rest)
        )
        for value in TWO_VALUES[field]
    )
    assert not torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("proximal", ["behavior", "loglinear"])
def test_a_ratio_to_another_proximal_policy_is_clipped_in_the_only_update(proximal):
    clipped = [
        gradient(run_config("ppo", {}, proximal=proximal, loss_config={"clip_ratio_high": high}))
        for high in (1e-6, 0.9)
    ]
    assert not torch.allclose(*clipped, rtol=1e-4, atol=1e-7)


def test_the_clip_range_of_values_acts_in_later_updates_alone():
    section = {"advantage": "gae", "value": {"clip_range": 1e-3, "lr": 0.02}}
    with pytest.raises(ValidationError, match="no value has moved when it is compared"):
        make_config(algorithm=section)
    trainer = make_trainer(make_config(algorithm=section, learner={"epochs": 3}))
    assert trainer.step(batch())["critic/vf_clipfrac"] > 0


def test_a_veto_without_weights_is_refused():
    with pytest.raises(ValidationError, match="threshold null switches weights off"):
        make_config(algorithm={"rollout_is": {"threshold": None, "veto_threshold": 1e-4}})
    make_config(algorithm={"rollout_is": "off"})
    make_config(algorithm={"rollout_is": {"threshold": None, "veto_threshold": None}})


def test_a_rate_scaled_by_ratios_that_are_not_computed_is_refused():
    with pytest.raises(ValidationError, match="no ratio is computed"):
        make_config(algorithm={"rollout_is": {"threshold": None, "scale_lr": True}})
    make_config(algorithm={"rollout_is": {"apply": False, "scale_lr": True}})


def test_the_refusal_names_the_field_its_value_and_its_place(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: addition}\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(path, ["algorithm.loss_config.clip_ratio_high=0.28"], {})
    assert str(refusal.value) == (
        "algorithm.loss_config.clip_ratio_high: was 0.28; with one update a batch and "
        "algorithm.proximal recompute the ratio is always 1, so it cannot act; set "
        "learner.updates_per_batch or learner.epochs above 1, or algorithm.proximal to behavior, "
        "loglinear or linear (--set algorithm.loss_config.clip_ratio_high)"
    )


@pytest.mark.parametrize("loss", LOSS_SETTINGS)
@pytest.mark.parametrize("overrides", [[], ["learner.epochs=2", "algorithm.entropy_coef=0.1"]])
def test_a_run_loads_the_configuration_that_it_wrote(tmp_path, loss, overrides):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: addition}\n")
    config = load_config(path, [f"algorithm.loss={loss}", *overrides], {}).config
    path.write_text(to_yaml(config))
    assert load_config(path, environment={}).config == config
    wanted = config.algorithm.loss_config.model_copy(update={"loss_agg_mode": "token-sum"})
    if loss not in SEQUENCE_MEAN_LOSSES or overrides:
        changed = load_config(path, ["algorithm.loss_config.loss_agg_mode=token-sum"], {}).config
        assert changed.algorithm.loss_config == wanted


@pytest.mark.parametrize("loss", SEQUENCE_MEAN_LOSSES)
def test_the_kl_to_a_teacher_is_a_term_that_the_mode_is_for(tmp_path, loss):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: addition}\n")
    given = [f"algorithm.loss={loss}", "algorithm.loss_config.loss_agg_mode=token-sum"]
    with pytest.raises(ConfigError, match="there is no other term"):
        load_config(path, given, {})
    taught = "algorithm.distillation={teachers: [{path: t}], top_k: 4}"
    config = load_config(path, [*given, taught], {}).config
    assert config.algorithm.loss_config.loss_agg_mode == "token-sum"
