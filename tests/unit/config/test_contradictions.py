"""Settings that can do nothing beside others, or undo what these are for, are refused."""

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from streamrl.config import RunConfig, contradictions
from streamrl.config.loading.explain import all_paths
from tests.training import make_config


def test_every_setting_that_a_sentence_gives_with_its_value_exists():
    code = inspect.getsource(contradictions).split('"""', 2)[2]
    names = set(contradictions.NAMED.findall(code))
    assert len(names) > 40
    assert names <= set(all_paths(RunConfig))


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"offload": {"activations": True}}, "learner.offload.activations: moves the inputs"),
        ({"offload": {"parameters": True, "optimizer": True}}, "optimizer: does nothing beside"),
        ({"offload": {"parameters": True, "reference": True}}, "reference: does nothing beside"),
        ({"offload": {"reference": True}}, "offload.reference has no reference policy to move"),
        (
            {"max_tokens_per_forward_pass": {"proximal": 100}},
            "forward_pass.proximal 100 has no pass",
        ),
        ({"max_tokens_per_forward_pass": {"values": 100}}, "values 100 has no critic"),
        (
            {"max_tokens_per_forward_pass": {"reference": 100}},
            "reference 100 has no pass of a reference policy",
        ),
    ],
)
def test_what_can_do_nothing_is_refused(learner, words):
    with pytest.raises(ValidationError, match=words):
        make_config(algorithm={"rollout_is": "token_is"}, learner=learner)


@pytest.mark.parametrize("role", ["proximal", "reference", "values"])
def test_a_limit_that_holds_no_trajectory_is_refused(role):
    algorithm = {"advantage": "gae", "kl_reward": {"coef": 0.1}}
    learner = {"max_tokens_per_forward_pass": {role: 19}}
    with pytest.raises(ValidationError, match=rf"{role} 19 cannot hold one trajectory: .* = 20"):
        make_config(algorithm=algorithm, learner=learner)


def test_each_limit_is_accepted_where_it_acts():
    roles = {"proximal": 100, "reference": 200, "values": 300}
    algorithm = {"advantage": "gae", "kl_reward": {"coef": 0.1}}
    config = make_config(algorithm=algorithm, learner={"max_tokens_per_forward_pass": roles})
    assert config.learner.max_tokens_per_forward_pass.model_dump() == roles


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_mean", "group"),
        ("format_penalty", 0.5),
    ],
)
def test_shaping_beside_remax_is_refused(name: str, value: Any):
    sentence = rf"remax subtracts the score .* algorithm\.reward\.{name} does not change"
    with pytest.raises(ValidationError, match=sentence):
        make_config(algorithm={"advantage": "remax", "reward": {name: value}})
    make_config(algorithm={"advantage": "rloo", "reward": {name: value}})


def test_remax_may_mask_what_was_cut():
    make_config(algorithm={"advantage": "remax", "reward": {"truncated": "mask"}})


SILENCING: list[dict[str, Any]] = [
    {"rejection": [{"token_k1": 2.0}]},
    {"second_moment": 0.04},
    {"mode": "clip"},
]
HARMLESS: list[dict[str, Any]] = [
    {},
    {"veto_threshold": 1e-4},
    {"rejection": [{"seq_mean_k3": 0.1}]},
    {"mode": "clip", "level": "sequence"},
    {"mode": "clip", "apply": False},
]


@pytest.mark.parametrize("correction", SILENCING, ids=str)
def test_single_tokens_of_weight_0_are_refused(correction: dict[str, Any]):
    with pytest.raises(ValidationError, match=r"silence all of it; .*normalize_by=kept"):
        make_config(algorithm={"loss": "geo_mean", "rollout_is": correction})
    kept = {**correction, "normalize_by": "kept"}
    make_config(algorithm={"loss": "geo_mean", "rollout_is": kept})
    make_config(algorithm={"loss": "gspo", "rollout_is": correction})


@pytest.mark.parametrize("correction", HARMLESS, ids=str)
def test_whole_sequences_of_weight_0_are_accepted(correction: dict[str, Any]):
    make_config(algorithm={"loss": "geo_mean", "rollout_is": correction})


def test_a_bound_that_is_for_the_metrics_alone_is_accepted():
    clip = {"mode": "clip"}
    make_config(algorithm={"loss": "geo_mean", "proximal": "behavior", "rollout_is": clip})
