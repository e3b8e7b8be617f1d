"""The advantage of teachers is the gradient of the reverse KL, in float64, for every token."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from streamrl.algorithms.kl import teacher_advantages
from streamrl.algorithms.losses import LossInput
from streamrl.algorithms.losses.policy import reinforce
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm import AlgorithmSettings

DOUBLE = torch.float64


def distributions(seed: int = 0, size: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the policy, of an older one, and of a teacher."""
    logits = torch.randn(3, size, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    policy, behavior, teacher = logits.log_softmax(-1)
    return policy, behavior, teacher


def test_the_value_by_hand():
    teacher = torch.tensor([math.log(0.5), math.log(0.1)], dtype=DOUBLE)
    student = torch.tensor([math.log(0.25), math.log(0.4)], dtype=DOUBLE)
    found = teacher_advantages(teacher, student)
    assert found.tolist() == pytest.approx([math.log(2), -2 * math.log(2)], abs=1e-15)


def expected_gradient(
    logits: torch.Tensor, behavior: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Of the loss reinforce with importance weights, over each token as often as it is sampled."""
    logprobs = logits.log_softmax(-1)
    weights = (logprobs.detach() - behavior).exp()
    section = {"loss": "reinforce", "loss_config": {"loss_agg_mode": "token-sum"}}
    config = AlgorithmSettings.model_validate(section)
    batch = LossInput(
        logprobs=logprobs,
        proximal_logprobs=logprobs.detach(),
        advantages=advantages,
        # Sampled once each; what the behavior policy would have sampled is in the weights.
        importance_weights=weights * behavior.exp(),
        sequences=Sequences.from_lengths([len(behavior)]),
    )
    loss = reinforce(batch, config.loss_config).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


@pytest.mark.parametrize("seed", range(3))
def test_with_the_policy_itself_it_is_the_gradient_of_the_reverse_kl_at_any_lag(seed: int):
    policy, behavior, teacher = distributions(seed)
    logits = policy.clone().requires_grad_()
    found = expected_gradient(logits, behavior, teacher_advantages(teacher, policy))
    current = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((current.exp() * (current - teacher)).sum(), logits)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


def test_with_the_behavior_policy_it_moves_away_from_that_too():
    policy, behavior, teacher = distributions()
    logits = policy.clone().requires_grad_()
    found = expected_gradient(logits, behavior, teacher_advantages(teacher, behavior))
    current = logits.log_softmax(-1)
    difference = (current.exp() * (behavior - teacher)).sum()
    (wanted,) = torch.autograd.grad(difference, logits)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


def test_a_policy_that_is_its_teacher_stays_where_it_is_compared_with_itself_alone():
    _, behavior, teacher = distributions()
    logits = teacher.clone().requires_grad_()
    own = expected_gradient(logits, behavior, teacher_advantages(teacher, teacher))
    older = expected_gradient(logits, behavior, teacher_advantages(teacher, behavior))
    assert own.abs().max() == 0
    assert older.abs().max() > 0.05


TEACHER: dict[str, Any] = {"path": "t"}


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"teachers": []}, "at least 1 item"),
        ({"teachers": [{}]}, "'teacher' has neither path nor url; set one"),
        ({"teachers": [{"path": "t", "url": "http://h"}]}, "has both path and url"),
        ({"teachers": [{"url": "h:80"}]}, "was 'h:80'; it begins with http:// or https://"),
        ({"teachers": [{"path": "t", "engine": "sglang"}]}, "engine: is for a teacher by url"),
        ({"teachers": [TEACHER, TEACHER]}, "2 have the name 'teacher'; give each a name"),
        ({"teachers": [TEACHER], "column": "who"}, "column: was 'who', and there is one teacher"),
        ({"teachers": [TEACHER], "coef": 0}, "greater than 0"),
    ],
)
def test_settings_that_say_nothing_are_refused(section: dict[str, Any], sentence: str):
    with pytest.raises(ValidationError) as error:
        AlgorithmSettings.model_validate({"distillation": section})
    assert sentence in str(error.value)


def test_shares_add_up_to_one_unless_a_row_names_its_teacher():
    teachers = [{"name": "a", "path": "t"}, {"name": "b", "path": "t", "weight": 3}]
    mixed = AlgorithmSettings.model_validate({"distillation": {"teachers": teachers}}).distillation
    assert mixed is not None
    assert [mixed.share(teacher) for teacher in mixed.teachers] == [0.25, 0.75]
    named = mixed.model_copy(update={"column": "teacher"})
    assert [named.share(teacher) for teacher in named.teachers] == [1.0, 1.0]
