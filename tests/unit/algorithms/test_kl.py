"""KL estimators, the exact KL, and the controllers of its weight."""

import pytest
import torch

from streamrl.algorithms import logprobs
from streamrl.algorithms.kl import (
    KlCoefficient,
    full_kl,
    kl_of_logits,
    kl_penalty,
)
from streamrl.algorithms.logprobs import LogitTransform
from streamrl.config.algorithm.settings import KL_ESTIMATORS, KL_KINDS, KlRewardSettings


@pytest.mark.parametrize("kind", [name for name in KL_KINDS if name.endswith("+")])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    logprobs = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64)
    plain = kl_penalty(logprobs, reference, kind.removesuffix("+"))
    straight = kl_penalty(logprobs, reference, kind)
    torch.testing.assert_close(straight, plain)
    (gradient,) = torch.autograd.grad(straight.sum(), logprobs)
    torch.testing.assert_close(gradient, (logprobs - reference).detach())


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_equal_policies_have_no_divergence(kind: str) -> None:
    logprobs = -torch.rand(5)
    assert not kl_penalty(logprobs, logprobs, kind).any()


@pytest.mark.parametrize("difference", [1e-2, 1e-4, -1e-4, -1e-6])
def test_k3_of_nearly_equal_policies_is_half_the_square(difference):
    """In float32, whose numbers near 1 are 1e-7 apart."""
    mine = torch.tensor([difference])
    expected = difference**2 / 2 - difference**3 / 6
    assert kl_penalty(mine, torch.zeros(1), "k3").item() == pytest.approx(expected, 2e-3, 1e-13)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_kl(kind: str) -> None:
    torch.manual_seed(0)
    logits, other = 0.5 * torch.randn(2, 1, 5, dtype=torch.float64)
    exact = kl_of_logits(logits, other)
    log_p, log_q = logits.log_softmax(-1)[0], other.log_softmax(-1)[0]
    expected = (log_p.exp() * kl_penalty(log_p, log_q, kind)).sum()
    torch.testing.assert_close(expected, exact[0])


def test_the_exact_kl_has_the_exact_gradient() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(4, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_of_logits(x, reference), logits)
    expected = torch.nn.functional.kl_div(
        reference.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(kl_of_logits(logits, reference), expected)


def test_the_exact_kl_from_hidden_states_never_holds_all_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.algorithms.kl._CHUNK_ELEMENTS", 20)
    hidden = torch.randn(9, 3, requires_grad=True)
    weight = torch.randn(10, 3, requires_grad=True)
    other, other_weight = torch.randn(9, 3), torch.randn(10, 3)
    transform = LogitTransform(temperature=0.7, softcap=5.0)
    chunked = full_kl(hidden, weight, other, other_weight, transform)
    logits, reference = transform(hidden @ weight.T), transform(other @ other_weight.T)
    whole = kl_of_logits(logits, reference)
    torch.testing.assert_close(chunked, whole)
    for leaf in (hidden, weight):
        ours, theirs = (
            torch.autograd.grad(kl.sum(), leaf, retain_graph=True) for kl in (chunked, whole)
        )
        torch.testing.assert_close(ours, theirs)


def test_logits_of_the_exact_kl_are_not_rounded_where_those_of_log_probabilities_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU; in bfloat16 the rounding of the logits would be twice the KL."""

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.to(logprobs._wide(left)) @ right.to(logprobs._wide(right))

    monkeypatch.setattr(logprobs, "_product", product)
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(4000, 256)).bfloat16()
    hidden = (15.0 * torch.randn(8, 256)).bfloat16()
    reference = (hidden + 0.15 * torch.randn(8, 256)).bfloat16()
    hidden.requires_grad_()
    exact_hidden = hidden.detach().double().requires_grad_()
    found = full_kl(hidden, weight, reference, weight)
    exact = full_kl(exact_hidden, weight.double(), reference.double(), weight.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0.0)
    (ours,) = torch.autograd.grad(found.sum(), hidden)
    (theirs,) = torch.autograd.grad(exact.sum(), exact_hidden)
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_a_reference_has_no_gradient_of_the_exact_kl() -> None:
    hidden, reference = torch.randn(2, 3, 4, requires_grad=True)
    weight = torch.randn(7, 4)
    kl = full_kl(hidden, weight, reference, torch.randn(7, 4)).sum()
    of_policy, of_reference = torch.autograd.grad(kl, (hidden, reference), allow_unused=True)
    assert of_policy.any()
    assert of_reference is None


def test_the_adaptive_controller_follows_the_kl() -> None:
    controller = KlCoefficient(
        KlRewardSettings(coef=0.1, controller="adaptive", target=0.05, horizon=100)
    )
    controller.update(current_kl=1.0, n_steps=10)
    assert controller.value == pytest.approx(0.1 * 1.02)
    controller.update(current_kl=0.0, n_steps=10)
    assert controller.value == pytest.approx(0.1 * 1.02 * 0.98)


def test_the_fixed_controller_stays() -> None:
    controller = KlCoefficient(KlRewardSettings(coef=0.1))
    controller.update(current_kl=9.0, n_steps=10)
    assert controller.value == 0.1
