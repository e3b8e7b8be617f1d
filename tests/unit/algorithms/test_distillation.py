"""The advantage of teachers is the gradient of the reverse KL, in float64, for every token."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from streamrl.algorithms.candidates import Likeliest, likeliest
from streamrl.algorithms.kl import kl_of_logits, teacher_advantages, topk_teacher_kl
from streamrl.algorithms.logprobs import LogitTransform
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
        ({"teachers": [{**TEACHER, "weight": 0}]}, "greater than 0"),
        ({"teachers": [TEACHER], "divergence": "forward_kl"}, "set top_k, such as 32"),
        ({"teachers": [TEACHER], "top_k": 4, "student": "behavior"}, "student: was behavior, and"),
        (
            {"teachers": [TEACHER, {"name": "b", "path": "t"}], "top_k": 4},
            "top_k: was 4, and a token has the candidates of one teacher; name that of each prompt",
        ),
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


def by_hand(policy: torch.Tensor, teacher: torch.Tensor, top_k: int, divergence: str) -> float:
    """Of log-probabilities [V] in double precision, term by term."""
    chosen = teacher.topk(top_k).indices.tolist()
    p, q = ([float(column[i].exp()) for i in chosen] for column in (policy, teacher))
    p, q = ([*part, 1 - sum(part)] for part in (p, q))
    p, q = (q, p) if divergence == "forward_kl" else (p, q)
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_the_kl_over_candidates_and_the_rest_is_the_formula_with_its_gradient(
    divergence: str, top_k: int
):
    policy, _, teacher = distributions(5)
    top = teacher.topk(top_k)

    def found(logits: torch.Tensor) -> torch.Tensor:
        own = logits.log_softmax(-1)[top.indices]
        return topk_teacher_kl(own[None], top.values[None], divergence)[0]

    wanted = by_hand(policy, teacher, top_k, divergence)
    assert float(found(policy)) == pytest.approx(wanted, abs=1e-12)
    logits = policy.clone().requires_grad_()
    assert torch.autograd.gradcheck(found, logits)
    whole = [policy, teacher] if divergence == "reverse_kl" else [teacher, policy]
    assert 0 <= wanted <= float(kl_of_logits(*(column[None] for column in whole))) + 1e-12


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_over_all_of_the_vocabulary_it_is_the_kl_and_without_a_candidate_nothing(divergence: str):
    policy, _, teacher = distributions(2)
    whole = [policy, teacher] if divergence == "reverse_kl" else [teacher, policy]
    found = topk_teacher_kl(policy[None], teacher[None], divergence)
    torch.testing.assert_close(found, kl_of_logits(*(column[None] for column in whole)))
    padded = torch.cat([teacher, teacher.new_full((2,), -math.inf)])
    own = torch.cat([policy, policy[:2]])
    torch.testing.assert_close(topk_teacher_kl(own[None], padded[None], divergence), found)
    none = torch.full_like(teacher, -math.inf)
    logits = policy.clone().requires_grad_()
    nothing = topk_teacher_kl(logits[None], none[None], divergence)
    nothing.sum().backward()
    assert nothing.tolist() == [0]
    assert not logits.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("top_k", [1, 5, 700])
def test_the_likeliest_are_those_of_whole_logits(top_k: int):
    """Of a vocabulary of several blocks, with a bias, a soft cap and a temperature."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(5000, 4), torch.randn(600, 4), torch.randn(600)
    transform = LogitTransform(0.7, softcap=3.0)
    found = likeliest(hidden, weight, top_k, bias, transform)
    logprobs = transform(hidden @ weight.T + bias).log_softmax(1)
    wanted = logprobs.topk(min(top_k, 600))
    torch.testing.assert_close(found.logprobs[:, :600], wanted.values)
    assert (found.logprobs[:, 600:] == -torch.inf).all()
    inside = found.logprobs > -torch.inf
    of_ids = logprobs.gather(1, found.token_ids)[inside]
    torch.testing.assert_close(of_ids, found.logprobs[inside])


def test_tokens_that_the_policy_has_not_are_no_candidates():
    top = Likeliest(torch.tensor([[3, 9]]), torch.tensor([[-0.5, -1.0]]))
    assert top.within(10) is top
    found = top.within(9)
    assert found.token_ids.tolist() == [[3, 0]]
    assert found.logprobs.tolist() == [[-0.5, -math.inf]]
