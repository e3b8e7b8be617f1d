"""The trust region of DPPO over the likeliest candidates, against whole distributions."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from streamrl.algorithms.candidates import Candidates, candidate_logprobs, masked_logprobs
from streamrl.algorithms.logprobs import LogitTransform
from streamrl.algorithms.losses import LossInput, policy_loss
from streamrl.algorithms.losses.policy import topk_kl, topk_tv
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.losses import DppoSettings
from tests.unit.algorithms.strategies import for_any

VOCABULARY = 12


@st.composite
def distributions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [R, V] of the behavior and the current policy, and sampled tokens [R]."""
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = (draw(st.integers(1, 6)), VOCABULARY)
    behavior = 3 * torch.randn(size, generator=numbers, dtype=torch.float64)
    move = draw(st.sampled_from([0.0, 0.1, 1.0, 3.0]))
    current = behavior + move * torch.randn(size, generator=numbers, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, size[:1], generator=numbers)
    return behavior.log_softmax(-1), current.log_softmax(-1), targets


def loss_input(
    behavior: Tensor, current: Tensor, targets: Tensor, k: int, **more: Any
) -> LossInput:
    """As the learner makes it: of the k likeliest of the behavior policy, those but the token."""
    values, ids = behavior.topk(k)
    rows = torch.arange(len(targets))
    owners = rows.repeat_interleave(k)
    top = Candidates(owners, ids.flatten(), len(rows), values.flatten()).without(targets)
    return LossInput(
        logprobs=current[rows, targets].clone().requires_grad_(),
        proximal_logprobs=behavior[rows, targets],
        advantages=more.pop("advantages", torch.ones(len(rows), dtype=torch.float64)),
        importance_weights=None,
        sequences=Sequences.from_lengths([len(rows)]),
        top_candidates=top,
        top_logprobs=current[top.owners, top.token_ids],
    )


def reduced(logprobs: Tensor, targets: Tensor, behavior: Tensor, k: int) -> list[Tensor]:
    """Of each row, the probabilities of TopK(behavior) and the token, then of all others as one."""
    found = []
    for row, target, likely in zip(logprobs, targets.tolist(), behavior, strict=True):
        chosen = sorted({*likely.topk(k).indices.tolist(), target})
        others = [i for i in range(VOCABULARY) if i not in chosen]
        found.append(torch.cat([row[chosen].exp(), row[others].exp().sum()[None]]))
    return found


@for_any
@given(distributions(), st.integers(1, VOCABULARY))
def test_divergences_are_those_of_the_reduced_distributions(drawn, k):
    behavior, current, targets = drawn
    batch = loss_input(behavior, current, targets, k)
    pairs = zip(
        reduced(behavior, targets, behavior, k),
        reduced(current, targets, behavior, k),
        strict=True,
    )
    tv, kl = zip(
        *(
            (
                (p - q).abs().sum() / 2,
                (q * (q.clamp(min=1e-12).log() - p.clamp(min=1e-12).log())).sum(),
            )
            for q, p in pairs
        ),
        strict=True,
    )
    torch.testing.assert_close(topk_tv(batch), torch.stack(tv), atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(topk_kl(batch), torch.stack(kl), atol=1e-9, rtol=1e-6)
    assert (topk_tv(batch) <= (behavior.exp() - current.exp()).abs().sum(-1) / 2 + 1e-9).all()


@for_any
@given(distributions())
def test_with_the_whole_vocabulary_they_are_exact(drawn):
    behavior, current, targets = drawn
    batch = loss_input(behavior, current, targets, VOCABULARY)
    exact = (behavior.exp() - current.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(topk_tv(batch), exact, atol=1e-9, rtol=1e-6)
    exact = (behavior.exp() * (behavior - current)).sum(-1)
    torch.testing.assert_close(topk_kl(batch), exact, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@for_any
@given(drawn=distributions(), seed=st.integers(0, 99))
def test_a_token_is_dropped_only_outside_the_region_and_on_its_way_out(name, drawn, seed):
    behavior, current, targets = drawn
    numbers = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(targets), generator=numbers, dtype=torch.float64)
    batch = loss_input(behavior, current, targets, 3, advantages=advantages)
    config = DppoSettings(
        clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=None, divergence_topk=3
    )
    policy_loss(name)(batch, config).loss.backward()
    divergence = topk_tv(batch) if name == "dppo_tv" else topk_kl(batch)
    ratio = (batch.logprobs - batch.proximal_logprobs).detach().exp()
    is_positive = advantages > 0
    is_outside = divergence > torch.where(is_positive, 0.15, 0.1)
    is_leaving = torch.where(is_positive, ratio > 1, ratio < 1)
    expected = torch.where(is_outside & is_leaving, 0.0, -advantages * ratio) / len(targets)
    torch.testing.assert_close(batch.logprobs.grad, expected, atol=1e-9, rtol=1e-5)


@for_any
@given(distributions())
def test_no_candidate_leaves_the_binary_form(drawn):
    behavior, current, targets = drawn
    batch = loss_input(behavior, current, targets, 1)
    alone = batch.top_candidates.without(torch.full_like(targets, -1))
    assert len(alone.owners) <= len(targets)
    none = Candidates(targets[:0], targets[:0], len(targets), behavior.new_zeros(0))
    object.__setattr__(batch, "top_candidates", none)
    object.__setattr__(batch, "top_logprobs", behavior.new_zeros(0))
    change = (batch.logprobs.exp() - batch.proximal_logprobs.exp()).abs()
    torch.testing.assert_close(topk_tv(batch), change.detach(), atol=1e-9, rtol=1e-6)


def test_a_loss_without_the_candidates_says_what_it_needs():
    rows = torch.zeros(2)
    batch = LossInput(rows, rows, rows, None, Sequences.from_lengths([2]))
    with pytest.raises(ValueError, match="divergence_topk needs the likeliest candidates"):
        policy_loss("dppo_tv")(batch, DppoSettings(divergence_topk=2))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_masked_logprobs_and_their_gradients_are_those_of_a_dense_mask(softcap):
    """With rows that have no mask, a bias, a temperature and a soft cap."""
    torch.manual_seed(0)
    sizes = {"hidden": (7, 5), "weight": (40, 5), "bias": (40,)}
    given = {
        name: torch.randn(size, dtype=torch.float64, requires_grad=True)
        for name, size in sizes.items()
    }
    hidden, weight, bias = given.values()
    targets = torch.randint(40, (7,))
    kept = torch.rand(7, 40) < 0.3
    kept[torch.arange(7), targets] = True
    kept[2] = False
    owners, ids = kept.nonzero(as_tuple=True)
    transform = LogitTransform(0.7, softcap=softcap, scale=1.3)
    mask = Candidates(owners, ids, 7)
    found = masked_logprobs(hidden, weight, targets, mask, bias, transform, with_entropy=True)
    whole = kept | ~kept.any(1, keepdim=True)
    dense = transform(hidden @ weight.T + bias).masked_fill(~whole, -torch.inf).log_softmax(1)
    logprobs = dense[torch.arange(7), targets]
    entropy = -(dense.exp() * dense.masked_fill(~whole, 0.0)).sum(1)
    torch.testing.assert_close(found.logprobs, logprobs)
    torch.testing.assert_close(found.entropy, entropy)
    factors = torch.randn(2, 7, dtype=torch.float64)
    pairs = [(found.logprobs, found.entropy), (logprobs, entropy)]
    gradients = [
        torch.autograd.grad((factors[0] * a + factors[1] * b).sum(), given.values())
        for a, b in pairs
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    top = Candidates(torch.tensor([0, 0, 5]), torch.tensor([3, 4, 9]), 7)
    plain = transform(hidden @ weight.T + bias)
    others = candidate_logprobs(
        hidden, weight, targets, found.logprobs.detach(), top, bias, transform
    )
    normalizer = (plain[torch.arange(7), targets] - logprobs)[top.owners]
    torch.testing.assert_close(others, (plain[top.owners, top.token_ids] - normalizer).detach())


def test_a_target_outside_of_its_mask_is_refused():
    mask = Candidates(torch.tensor([0]), torch.tensor([3]), 1)
    with pytest.raises(ValueError, match="among its candidates"):
        masked_logprobs(torch.zeros(1, 2), torch.zeros(5, 2), torch.tensor([4]), mask)
