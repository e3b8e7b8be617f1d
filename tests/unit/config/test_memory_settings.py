"""`learner.offload` and `learner.max_tokens_per_forward_pass`: what can do nothing is refused."""

import pytest
from pydantic import ValidationError

from tests.training import make_config


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"offload": {"activations": True}}, "gradient_checkpointing is false: set it to true"),
        ({"offload": {"parameters": True, "optimizer": True}}, "optimizer does nothing beside"),
        ({"offload": {"parameters": True, "reference": True}}, "reference does nothing beside"),
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
