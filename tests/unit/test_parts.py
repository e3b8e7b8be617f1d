"""A batch trained in parts makes the update of the whole, under all settings that accept parts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from learners.batch.training_batch import TrainingBatch
from learners.trainer import Trainer
from streamrl.algorithms.parts import accepts_parts
from streamrl.config import RunConfig
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.losses import LOSS_SETTINGS
from streamrl.types import FinishReason, Trajectory, TrajectoryGroup, Turn, replace
from tests.records import with_candidates, with_experts
from tests.training import make_config, make_groups, make_trainer

WHOLE = (5,)
OF_THE_WORK = frozenset(
    f"learner/{name}"
    for name in (
        *("train_s", "tokens_per_s", "num_parts", "num_micro_batches", "tflops_per_s"),
        *(f"{phase}_s" for phase in ("plan", "score", "forward", "backward", "update")),
    )
)
"""Metrics that depend on how the batch was cut."""

ACCEPTING: list[dict[str, Any]] = [
    {},
    *({"advantage": name} for name in ("reinforce", "grpo", "dr_grpo", "grpo_passk", "rloo")),
    *({"advantage": name} for name in ("remax", "opo")),
    {"advantage": "reinforce", "advantage_config": {"gamma": 0.9, "clip": 0.3}},
    {"advantage": "reinforce", "reward": {"placement": "turn"}},
    {"advantage_config": {"norm_adv_by_std": False}},
    *({"loss": name} for name in LOSS_SETTINGS if name not in ("clip_cov", "kl_cov")),
    *(
        {"loss_config": {"loss_agg_mode": "seq-mean-" + mode}}
        for mode in ("token-sum", "token-mean")
    ),
    {"loss_config": {"loss_agg_mode": "token-sum"}},
    {"loss_config": {"loss_agg_mode": "seq-mean-token-sum-norm"}},
    {"loss_config": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64}},
    {"loss_config": {"loss_agg_mode": "seq-mean-token-sum-norm", "norm_by_sequences": False}},
    {
        "loss_config": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0},
        "proximal": "behavior",
    },
    {"loss": "sapo", "loss_config": {"tau_pos": 2.0, "tau_neg": 3.0}, "proximal": "loglinear"},
    {"loss": "topr", "loss_config": {"topr_positive_weight": 0.5, "topr_negative_weight": 2.0}},
    *(
        {
            "loss": "dro",
            "loss_config": {"dro_beta": 0.1, "dro_level": level},
            "proximal": "behavior",
        }
        for level in ("token", "sequence")
    ),
    {"loss": "gspo", "loss_config": {"loss_agg_mode": "seq-mean-token-sum"}, "entropy_coef": 0.1},
    *({"proximal": name} for name in ("recompute", "behavior", "loglinear", "linear")),
    {"rl_loss_coef": 0.5, "entropy_coef": 0.1, "sft_coef": 0.2},
    {"kl_loss": {"coef": 0.3, "kind": "k3+"}},
    {"kl_loss": {"coef": 0.3, "kind": "full"}},
    {"rollout_is": "off"},
    {"rollout_is": {"apply": False, "veto_threshold": 0.01}},
    *({"rollout_is": {"level": name}} for name in ("token", "sequence", "geometric")),
    {"rollout_is": {"mode": "clip", "threshold": 5.0, "threshold_lower": 0.5}},
    {"rollout_is": {"level": "sequence", "threshold": 8.0, "scale_lr": True}},
    {
        "loss": "vespo",
        "loss_config": {"k_pos": 1.0, "lambda_pos": 2.0, "k_neg": 2.0, "lambda_neg": 1.0},
        "proximal": "behavior",
    },
    {"loss": "dppo_tv", "loss_config": {"divergence_topk": 3}, "proximal": "behavior"},
    {"rollout_is": {"rejection": [{"token_k3": 0.5}], "normalize_by": "all"}},
    {"rollout_is": {"rejection": [{"token_k3": 0.5}]}, "proximal": "behavior"},
    {"reward": {"norm_mean": "group", "norm_std": "group", "clip": 0.5}},
    {"reward": {"agentic": {"grouping": "state", "method": "asym_clip"}, "format_penalty": 0.5}},
    {"reward": {"length": {"max_length": 10, "buffer": 8, "penalty": 0.5}}},
    {"reward": {"difficulty_low": 0.4, "difficulty_high": 0.6}},
    {"reward": {"truncated": "mask"}},
    {"dynamic_sampling": {"metric": "reward", "max_refills": 2}},
    {"reward": {"truncated": "penalize", "truncated_penalty": 0.5}},
    *({"advantage": name, "proximal": "behavior"} for name in ("opob", "otb")),
    {"advantage": "maxrl"},
    {"advantage": "gigpo", "advantage_config": {"turn_gamma": 0.5, "step_weight": 2.0}},
    {"loss": "luspo", "entropy_coef": 0.1, "loss_config": {"loss_agg_mode": "seq-mean-token-sum"}},
    {"loss": "dppo_tv", "loss_config": {"log_ratio_coef": 0.1}, "proximal": "behavior"},
    {"distillation": {"teachers": [{"path": "t"}], "coef": 0.5}},
    {"distillation": {"teachers": [{"path": "t"}], "student": "behavior"}, "proximal": "recompute"},
    {"distillation": {"teachers": [{"path": "t"}], "student": "proximal"}},
    {"distillation": {"teachers": [{"path": "t"}], "top_k": 3, "divergence": "forward_kl"}},
    {
        "distillation": {
            "teachers": [
                {"name": "a", "path": "t"},
                {"name": "b", "url": "http://127.0.0.1:1", "weight": 2.0},
            ],
            **{"reward_coef": 0.3, "timeout_s": 9.0, "retries": 1, "max_concurrent": 2},
        },
    },
    {
        "distillation": {
            "teachers": [{"name": "a", "path": "t"}, {"name": "b", "path": "t"}],
            "column": "teacher",
            "template": "{{prompt}}{{answer}}",
        },
    },
    {"preset": "stream"},
    {"router_replay": "replay"},
    {"rescore_share": 0.5, "rollout_is": {"engine_threshold": 2.0, "lag_threshold": 1.5}},
]
REFUSING: list[dict[str, Any]] = [
    *({"advantage": name} for name in ("gae", "gpg", "reinforce_plus_plus")),
    {"advantage": "gae", "advantage_config": {"lam": 0.9}},
    {"advantage": "gpg", "advantage_config": {"f_norm": 2.0}},
    {"advantage": "reinforce_plus_plus_baseline"},
    {"advantage_config": {"whiten": True}},
    {"loss": "clip_cov", "loss_config": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.5}},
    {"loss": "clip_cov", "loss_config": {"clip_cov_ub": 4.0}},
    {
        "loss": "kl_cov",
        "loss_config": {"kl_cov_ratio": 0.1, "kl_cov_coef": 0.2},
        "proximal": "behavior",
    },
    {"loss": "gspo", "entropy_coef": 0.1},
    {"loss": "gspo", "sft_coef": 0.1},
    {"loss": "geo_mean", "kl_loss": {"coef": 0.1}},
    {"kl_reward": {"coef": 0.1, "kind": "k1"}},
    {"kl_reward": {"coef": 0.1, "controller": "adaptive", "target": 0.2, "horizon": 100}},
    {"rollout_is": {"batch_normalize": True}},
    {"rollout_is": {"mode": "clip", "normalize_by": "kept"}},
    {"rollout_is": {"second_moment": 0.04}},
    *({"advantage": name, "proximal": "recompute"} for name in ("opob", "otb")),
    {"advantage": "rae", "advantage_config": {"role": "num_invalid_turns", "decay": 0.5}},
    {"advantage": "gdpo", "advantage_config": {"rewards": {"num_invalid_turns": 1.0}}},
    {
        "distillation": {"teachers": [{"path": "t"}], "student": "proximal"},
        "proximal": "recompute",
    },
    *({"reward": {"norm_mean": scope}} for scope in ("batch", "running")),
    *({"reward": {"norm_std": scope}} for scope in ("batch", "running")),
    *({"reward": {"agentic": {"grouping": name}}} for name in ("batch", "inductive")),
    {"reward": {"whiten": True}},
    {"sample_weight": {"difficulty": True}},
    {"sample_weight": {"length": True}},
    {"pf_ppo": {"method": "pow", "weight_pow": 1.0}},
    {"echo_coef": 0.1},
    {"value": {"clip_range": None, "coef": 0.5, "loss_agg_mode": "token-sum"}, "advantage": "gae"},
    {"value": {"lr": 1e-3, "critic_warmup": 2}, "advantage": "gae"},
    {"value": {"model_path": "a", "max_tokens_per_micro_batch": 40}, "advantage": "gae"},
    {
        "value": {"betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "advantage": "gae",
    },
]


def leaves(section: type[BaseModel]) -> Iterator[str]:
    """The dotted names of all settings."""
    for name, field in section.model_fields.items():
        is_list = get_origin(field.annotation) is tuple
        kinds = () if is_list else (field.annotation, *get_args(field.annotation))
        match name:
            case "loss_config":
                records = list(LOSS_SETTINGS.values())
            case "advantage_config":
                records = list(ADVANTAGE_SETTINGS.values())
            case _:
                records = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        yield from (f"{name}.{leaf}" for record in records for leaf in leaves(record))
        if not records:
            yield name


def named(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and name != "rewards":
            yield from named(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_setting_of_the_algorithm_is_tried():
    tried = {name for settings in ACCEPTING + REFUSING for name in named(settings)}
    assert set(leaves(AlgorithmSettings)) - tried == set()
    advantages = {settings.get("advantage") for settings in ACCEPTING + REFUSING}
    losses = {settings.get("loss") for settings in ACCEPTING + REFUSING}
    assert advantages >= set(ADVANTAGE_SETTINGS)
    assert losses >= set(LOSS_SETTINGS)


def of(algorithm: Mapping[str, Any]) -> RunConfig:
    learner = {"max_tokens_per_micro_batch": 64, "report_entropy": True}
    # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
    environment = {"environment": "tools"}
    return make_config(
        algorithm=algorithm, learner=learner, optimizer={"eps": 1e-5}, generator=environment
    )


def one_turn(trajectory: Trajectory) -> Turn:
    return Turn(
        num_observation_tokens=0,
        num_completion_tokens=trajectory.num_response_tokens,
        finish_reason=FinishReason.STOP,
        reward=0.7,
    )


def with_facts(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """With what some settings read; the last of each group is truncated."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(
                    t,
                    metrics={"greedy_reward": 0.2, "num_invalid_turns": float(i)},
                    turns=(one_turn(t),),
                    teacher_logprobs=np.where(t.response_mask, -0.5, 0).astype(np.float32),
                    finish_reason=FinishReason.LENGTH if i == 3 else FinishReason.STOP,
                )
                for i, t in enumerate(group.trajectories)
            ),
        )
        for group in groups
    ]


def train(trainer: Trainer, sizes: Sequence[int], seed: int = 0) -> dict[str, float]:
    """One update over five groups, in parts of these sizes; metrics."""
    groups = [with_candidates(group, 9, 3) for group in with_facts(make_groups(seed))]
    groups = [with_experts(group) for group in groups]
    for size in sizes:
        trainer.accumulate(TrainingBatch.of(groups[:size], policy_version=4))
        groups = groups[size:]
    return trainer.update()


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}


def assert_same_update(
    whole: tuple[Trainer, dict[str, float]], parts: tuple[Trainer, dict[str, float]]
) -> None:
    before = make_trainer(whole[0]._config).policy.parameters()
    after = parameters(parts[0])
    for name, parameter in parameters(whole[0]).items():
        assert (parameter - before[name]).abs().max() > 1e-4, f"{name} was not updated"
        assert torch.allclose(parameter, after[name], rtol=0, atol=5e-6), name
    assert whole[1].keys() == parts[1].keys()
    for name in whole[1].keys() - OF_THE_WORK:
        assert parts[1][name] == pytest.approx(whole[1][name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [*((a, (1, 3, 1)) for a in ACCEPTING), ({}, (2, 3)), ({"entropy_coef": 0.1}, (1,) * 5)],
    ids=str,
)
def test_parts_make_the_update_of_the_whole(algorithm, sizes):
    config = of(algorithm)
    assert accepts_parts(config.algorithm)
    whole, in_parts = make_trainer(config), make_trainer(config)
    metrics = train(in_parts, sizes)
    assert metrics["learner/num_parts"] == len(sizes)
    assert_same_update((whole, train(whole, WHOLE)), (in_parts, metrics))


@pytest.mark.parametrize("algorithm", REFUSING, ids=str)
def test_a_batch_whose_groups_depend_on_each_other_is_taken_as_a_whole(algorithm):
    config = of(algorithm)
    assert not accepts_parts(config.algorithm)
    with pytest.raises(ValueError, match="takes a batch as a whole"):
        train(make_trainer(config), (2, 3))


def test_a_batch_with_several_updates_is_taken_as_a_whole():
    assert not accepts_parts(of({}).algorithm, num_updates=2)


def test_a_discarded_part_is_in_no_update():
    config = of({"entropy_coef": 0.1})
    plain, discarding = make_trainer(config), make_trainer(config)
    discarding.accumulate(TrainingBatch.of(make_groups(seed=7), policy_version=4))
    discarding.discard()
    whole = plain, train(plain, WHOLE)
    assert_same_update(whole, (discarding, train(discarding, (2, 3))))


def test_the_parts_of_a_step_are_not_in_the_next():
    config = of({})
    plain, in_parts = make_trainer(config), make_trainer(config)
    for seed in range(3):
        whole = plain, train(plain, WHOLE, seed)
        assert_same_update(whole, (in_parts, train(in_parts, (1, 4), seed)))
