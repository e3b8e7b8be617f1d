"""Objectives that no original has recorded cases of: numbers by hand, from the papers' formulas."""

import math

import pytest
import torch
from torch import Tensor

from streamrl.algorithms.advantages import ADVANTAGES, AdvantageInput
from streamrl.algorithms.losses import POLICY_LOSSES, LossInput
from streamrl.algorithms.objective import proximal_logprobs
from streamrl.algorithms.reward_shaping import RoleBaselines
from streamrl.algorithms.sequences import Sequences
from tests.settings import AdvantageConfig, LossConfig


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(ours: Tensor, *expected: float) -> None:
    """As near as standard deviations of about 0.3 are with 1e-6 added."""
    assert ours.tolist() == pytest.approx(expected, rel=5e-6, abs=1e-9)


def outcomes(*rewards: float, groups: list[int]) -> AdvantageInput:
    """Of responses of one token."""
    sequences = Sequences.from_lengths([1] * len(rewards))
    return AdvantageInput(tensor(*rewards), torch.tensor(groups), sequences)


def test_maxrl_divides_by_the_share_that_succeeded() -> None:
    """(r - mean) / mean: arXiv 2602.02710."""
    batch = outcomes(1, 0, 0, 0, 1, 1, 0, 1, 0, 0, groups=[0] * 4 + [1] * 4 + [2] * 2)
    third = 1 / 3
    expected = (3, -1, -1, -1, third, third, -1, third, 0, 0)
    close(ADVANTAGES["maxrl"](batch, AdvantageConfig()), *expected)


def test_maxrl_of_a_group_whose_mean_is_not_positive_is_0() -> None:
    batch = outcomes(-1, 0, 1, -1, 5, groups=[0, 0, 1, 1, 2])
    close(ADVANTAGES["maxrl"](batch, AdvantageConfig()), 0, 0, 0, 0, 0)


def test_maxrl_beside_negative_rewards_is_no_larger_than_without_them() -> None:
    """A mean of 1/1000 would make 999 of the first; without negative ones it is at most n - 1."""
    batch = outcomes(1, -0.5, -0.496, 0, groups=[0] * 4)
    close(ADVANTAGES["maxrl"](batch, AdvantageConfig()), 3, -1, -1, -1)


PROBABILITIES = (0.5, 0.8, 0.6, 0.9, 0.5, 0.7)


def responses(behavior: tuple[float, ...] = PROBABILITIES) -> AdvantageInput:
    """Siblings of 2, 1 and 3 tokens with rewards 1, 0 and 2."""
    return AdvantageInput(
        tensor(0, 1, 0, 0, 0, 2),
        torch.zeros(3).long(),
        Sequences.from_lengths([2, 1, 3]),
        logprobs=tensor(*PROBABILITIES).log(),
        behavior_logprobs=tensor(*behavior).log(),
    )


def test_otb_weighs_rewards_to_go_by_the_energy_so_far() -> None:
    """sum W G / sum W at each place, W of 1 - 2 p + sum p^2: arXiv 2602.07078.

    In a vocabulary of two that is 2 (1 - p)^2, of which W is .5, .58 | .32 | .02, .52, .7.
    """
    first, second = 0.54 / 0.84, (0.58 + 1.04) / 1.1
    expected = (1 - first, 1 - second, -first, 2 - first, 2 - second, 2)
    close(ADVANTAGES["otb"](responses(), AdvantageConfig()), *expected)


def test_otb_scales_an_energy_by_the_squared_ratio_up_to_2() -> None:
    """Of the second sibling, .6 / .15 is bounded to 2: W is 4 * .32."""
    behavior = (0.5, 0.8, 0.15, 0.9, 0.5, 0.7)
    first, second = 0.54 / (0.52 + 1.28), (0.58 + 1.04) / 1.1
    expected = (1 - first, 1 - second, -first, 2 - first, 2 - second, 2)
    close(ADVANTAGES["otb"](responses(behavior), AdvantageConfig()), *expected)


def test_otb_of_certain_tokens_is_the_mean_whatever_comes_before_them_in_the_batch() -> None:
    num_others = 100_000
    logprobs = torch.cat([torch.full((num_others,), -1.0), torch.zeros(3)]).double()
    batch = AdvantageInput(
        torch.cat([torch.zeros(num_others), torch.tensor([0.0, 1.0, 5.0])]).double(),
        torch.tensor([0, 1, 1, 1]),
        Sequences.from_lengths([num_others, 1, 1, 1]),
        logprobs=logprobs,
        behavior_logprobs=logprobs,
    )
    close(ADVANTAGES["otb"](batch, AdvantageConfig())[num_others:], -2, -1, 3)


def rewarded_twice() -> AdvantageInput:
    """Two groups of two; the second reward is ten times as large in the first group."""
    components = torch.tensor([[1, 0], [0, 20], [1, 0], [1, 3]], dtype=torch.float64)
    sequences = Sequences.from_lengths([1] * 4)
    groups = torch.tensor([0, 0, 1, 1])
    return AdvantageInput(torch.zeros(4).double(), groups, sequences, components=components)


def test_gdpo_adds_rewards_that_are_normalized_one_by_one() -> None:
    """Of two siblings each normalized reward is +-sqrt(1/2), or 0: arXiv 2601.05242."""
    config = AdvantageConfig(rewards={"first": 1.0, "second": 0.5}, whiten=False)
    half = math.sqrt(0.5) / 2
    close(ADVANTAGES["gdpo"](rewarded_twice(), config), half, -half, -half, half)
    whitened = config.model_copy(update={"whiten": None})
    place = math.sqrt(3 / 4)
    close(ADVANTAGES["gdpo"](rewarded_twice(), whitened), place, -place, -place, place)


def test_gdpo_of_one_reward_is_grpo_whitened() -> None:
    batch = outcomes(0.3, 0.9, 2, 5, groups=[0, 0, 1, 1])
    alone = AdvantageInput(
        batch.token_rewards, batch.groups, batch.sequences, components=batch.token_rewards[:, None]
    )
    ours = ADVANTAGES["gdpo"](alone, AdvantageConfig(rewards={"reward": 1.0}))
    grpo = ADVANTAGES["grpo"](batch, AdvantageConfig())
    torch.testing.assert_close(ours, batch.whiten(grpo))


def test_rae_compares_an_episode_with_those_of_its_role_before_it() -> None:
    """b <- .75 b + .25 s from 0 on for each role, and s - b: arXiv 2506.24119.

    The first role has b 0, 1/4, 3/16, the second 0, -1/4; the next batch goes on with 25/64.
    """
    batch = outcomes(1, -1, 0, 1, 1, groups=[0, 0, 1, 1, 2])
    roles = RoleBaselines(decay=0.75)
    before = roles.follow(["g/0", "g/1", "g/0", "g/0", "g/1"], batch.returns)
    given = AdvantageInput(batch.token_rewards, batch.groups, batch.sequences, baseline=before)
    close(ADVANTAGES["rae"](given, AdvantageConfig()), 1, -1, -1 / 4, 13 / 16, 5 / 4)
    resumed = RoleBaselines(decay=0.75)
    resumed.load_state_dict({"kl_coef": 0.1, **roles.state_dict()})
    close(resumed.follow(["g/0", "g/1", "h/0"], tensor(0, 0, 0)), 25 / 64, 1 / 16, 0)


def test_gigpo_compares_turns_that_answered_one_observation() -> None:
    """Episode plus turn, each (x - mean) / std: arXiv 2505.10978, with gamma 1/2.

    All first turns answered observation 7, with returns 1/2, 0, 0; of the second turns two
    answered 8, with 1 and 0, and one answered 9 alone.
    """
    batch = AdvantageInput(
        tensor(0, 0, 1, 0, 0, 0, 0),
        torch.zeros(3).long(),
        Sequences.from_lengths([3, 2, 2]),
        anchors=torch.tensor([0, 7, 8, 7, 8, 7, 9]),
    )
    best, other = 2 / math.sqrt(3), -1 / math.sqrt(3)
    pair = math.sqrt(0.5)
    expected = (2 * best, 2 * best, best + pair, 2 * other, other - pair, 2 * other, other)
    close(ADVANTAGES["gigpo"](batch, AdvantageConfig(turn_gamma=0.5)), *expected)


def test_gigpo_tells_the_observations_of_one_group_from_those_of_another() -> None:
    batch = AdvantageInput(
        tensor(1, 0, 5, 3),
        torch.tensor([0, 0, 1, 1]),
        Sequences.from_lengths([1] * 4),
        anchors=torch.tensor([7, 7, 7, 7]),
    )
    twice = 2 * ADVANTAGES["grpo"](batch, AdvantageConfig())
    torch.testing.assert_close(ADVANTAGES["gigpo"](batch, AdvantageConfig()), twice)


def loss_batch(*log_ratios: float) -> LossInput:
    """Sequences of one token, A = 1, and of the others, A = -2."""
    proximal = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    sequences = Sequences.from_lengths([1, len(log_ratios) - 1])
    return LossInput(
        (proximal + tensor(*log_ratios)).requires_grad_(),
        proximal,
        sequences.expand(tensor(1, -2)),
        None,
        sequences,
    )


def test_luspo_counts_a_sequence_by_its_length() -> None:
    """mean of |y| min(s A, clip(s) A), s the geometric mean of ratios: arXiv 2602.05261."""
    batch, shared = loss_batch(0.1, 0.1, -0.2, 0.4), math.exp(0.1)
    loss = POLICY_LOSSES["luspo"](batch, LossConfig()).loss
    assert loss.item() == pytest.approx((-shared + 3 * 2 * shared) / 2)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    close(gradient, -shared / 2, shared, shared, shared)


def test_luspo_clips_as_gspo_does() -> None:
    batch = loss_batch(0.3, 0.1, -0.2, 0.4)
    loss = POLICY_LOSSES["luspo"](batch, LossConfig()).loss
    assert loss.item() == pytest.approx((-1.2 + 3 * 2 * math.exp(0.1)) / 2)


def test_dppo_adds_the_squared_log_ratio_of_all_tokens() -> None:
    """coef D^2: arXiv 2602.02276. The first token left the trust region, and has that alone."""
    batch, coef = loss_batch(0.6, 0.1, -0.2, 0.4), 0.01
    config = LossConfig(log_ratio_coef=coef, loss_agg_mode="token-sum")
    (gradient,) = torch.autograd.grad(POLICY_LOSSES["dppo_tv"](batch, config).loss, batch.logprobs)
    inside = [2 * math.exp(d) + 2 * coef * d for d in (0.1, -0.2, 0.4)]
    close(gradient, 2 * coef * 0.6, *inside)


def test_cispo_weighs_log_p_by_the_bounded_ratio_which_has_no_gradient() -> None:
    """sg(clip(r, 1 - low, 1 + high)) A log p, whatever the sign of A: arXiv 2506.13585, equations 4
    and 5, whose experiments have no lower bound."""
    log_ratios = (0.4, 0.1, -3.0, 0.4)
    for low, of_third in ((0.2, 0.8), (1.0, math.exp(-3.0))):
        batch = loss_batch(*log_ratios)
        config = LossConfig(clip_ratio_low=low, clip_ratio_high=0.2, loss_agg_mode="token-sum")
        loss = POLICY_LOSSES["cispo"](batch, config).loss
        weights = (1.2, math.exp(0.1), of_third, 1.2)
        gradient = [-w * a for w, a in zip(weights, (1, -2, -2, -2), strict=True)]
        terms = [g * (-1 + d) for g, d in zip(gradient, log_ratios, strict=True)]
        assert loss.item() == pytest.approx(sum(terms))
        close(torch.autograd.grad(loss, batch.logprobs)[0], *gradient)


def test_the_linear_proximal_policy_lies_between_the_probabilities() -> None:
    """(1 - a) mu + a pi with a = lag / (lag + 1): AReaL, beside arXiv 2512.06547."""
    behavior, current = tensor(0.2, 0.2, 0.2).log(), tensor(0.6, 0.6, 0.6).log()
    between = proximal_logprobs("linear", current, behavior, torch.tensor([0, 1, 3]))
    close(between.exp(), 0.2, 0.4, 0.5)


def test_kimi_squares_the_log_ratio_of_the_whole_response() -> None:
    """Mean over responses of -A log p(y) + tau / 2 (log p(y) / q(y))^2: arXiv 2501.12599."""
    sequences = Sequences.from_lengths([3, 0, 2])
    logprobs = tensor(-0.5, -1.5, -0.2, -2.0, -0.1).requires_grad_()
    behavior = tensor(-0.7, -1.0, -0.1, -1.0, -0.4)
    mask = torch.tensor([True, True, False, True, True])
    batch = LossInput(
        logprobs=logprobs,
        proximal_logprobs=behavior,
        advantages=tensor(2, 2, 2, -1, -1),
        importance_weights=None,
        sequences=sequences,
        loss_mask=mask,
    )
    numbers = {"dro_beta": 0.4, "dro_level": "sequence", "loss_agg_mode": "seq-mean-token-sum"}
    output = POLICY_LOSSES["dro"](batch, LossConfig(**numbers))
    first, second = -0.3, -0.7
    expected = (2 * 2.0 + 0.2 * first**2 - 1 * 2.1 + 0.2 * second**2) / 2
    close(output.loss.detach()[None], expected)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    of_first, of_second = (-2 + 0.4 * first) / 2, (1 + 0.4 * second) / 2
    close(gradient, of_first, of_first, 0, of_second, of_second)
