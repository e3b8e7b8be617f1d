"""Promises of the advantage estimators beyond the recorded vectors."""

import pytest
import torch
from hypothesis import given, strategies as st

from streamrl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInput,
    discounted_sum,
    estimate_advantages,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from tests.settings import AdvantageConfig
from tests.unit.algorithms.strategies import for_any

WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
MISSING = (
    *(("gae", "values"), ("remax", "baseline"), ("opob", "logprobs"), ("otb", "logprobs")),
    *(("gdpo", "components"), ("gigpo", "anchors")),
)
REWARDS = {"first": 1.0, "second": -0.5}


def test_the_table_has_the_names_of_the_config() -> None:
    assert tuple(ADVANTAGES) == tuple(ADVANTAGE_SETTINGS)


@for_any
@given(st.lists(st.integers(0, 20), max_size=5), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_the_discounted_sum_agrees_with_the_recursion(lengths: list[int], gamma: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(sum(lengths), dtype=torch.float64)
    expected = []
    for part in values.split(lengths):
        running, backwards = 0.0, []
        for value in reversed(part.tolist()):
            running = value + gamma * running
            backwards.append(running)
        expected += backwards[::-1]
    total = discounted_sum(values, Sequences.from_lengths(lengths), gamma)
    torch.testing.assert_close(total, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "opob", "otb", "maxrl"])
@pytest.mark.parametrize("reward", [0.1, 0.3, -0.7])
def test_siblings_of_one_reward_have_no_advantage_at_all(name: str, reward: float) -> None:
    """Not even a rounding error: a run looks for exactly 0 to say that it does not learn."""
    logprobs = -torch.rand(21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards = torch.zeros(21, dtype=torch.float64)
    rewards[2::3] = reward
    batch = AdvantageInput(
        rewards,
        torch.zeros(7).long(),
        Sequences.from_lengths([3] * 7),
        logprobs=logprobs,
        behavior_logprobs=logprobs.flip(0),
    )
    assert not ADVANTAGES[name](batch, AdvantageConfig()).any()


@pytest.mark.parametrize("name", ADVANTAGE_SETTINGS)
def test_advantages_do_not_depend_on_the_order_of_trajectories(name: str) -> None:
    batch = _batch()
    config = AdvantageConfig(gamma=0.9, lam=0.8, rewards=REWARDS)
    forwards = ADVANTAGES[name](batch, config)
    backwards = ADVANTAGES[name](_turned(batch), config)
    parts = backwards.split(batch.sequences.lengths.flip(0).tolist())
    torch.testing.assert_close(torch.cat(parts[::-1]), forwards)


@pytest.mark.parametrize("name", ADVANTAGE_SETTINGS)
def test_advantages_have_the_type_of_the_rewards_and_no_gradient(name: str) -> None:
    batch = _batch(torch.float32)
    assert batch.values is not None
    batch.values.requires_grad_()
    advantages = estimate_advantages(name, batch, AdvantageConfig(rewards=REWARDS))
    assert advantages.dtype == torch.float32
    assert not advantages.requires_grad


def test_gae_with_perfect_values_has_no_advantage() -> None:
    sequences = Sequences.from_lengths([3])
    rewards = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    values = torch.tensor([0.81, 0.9, 1.0], dtype=torch.float64)
    batch = AdvantageInput(rewards, torch.zeros(1).long(), sequences, values)
    torch.testing.assert_close(
        ADVANTAGES["gae"](batch, AdvantageConfig(gamma=0.9, lam=0.95)),
        torch.zeros(3, dtype=torch.float64),
    )


def test_a_group_of_one_keeps_its_score_where_siblings_are_subtracted() -> None:
    sequences = Sequences.from_lengths([2])
    batch = AdvantageInput(torch.tensor([0.0, 0.7]), torch.tensor([9]), sequences)
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg"):
        advantages = ADVANTAGES[name](batch, AdvantageConfig())
        torch.testing.assert_close(advantages, torch.tensor([0.7, 0.7]), rtol=2e-6, atol=0)


def test_whitening_and_clipping_follow_the_estimator() -> None:
    config = AdvantageConfig(whiten=True, clip=0.5)
    advantages = estimate_advantages("grpo", _batch(), config)
    assert float(advantages.abs().max()) == 0.5


@pytest.mark.parametrize("name", WHITENED)
def test_an_estimator_that_whitens_does_not_where_it_is_told_so(name: str) -> None:
    batch = _batch()
    plain, usual = (
        estimate_advantages(name, batch, AdvantageConfig(whiten=choice, rewards=REWARDS))
        for choice in (False, None)
    )
    assert not torch.allclose(plain, usual)
    torch.testing.assert_close(batch.whiten(plain), usual)


def test_missing_and_impossible_inputs_are_named() -> None:
    batch = _batch()
    bare = AdvantageInput(batch.token_rewards, batch.groups, batch.sequences)
    for name, missing in MISSING:
        with pytest.raises(ValueError, match=missing):
            ADVANTAGES[name](bare, AdvantageConfig())
    with pytest.raises(ValueError, match="groups"):
        AdvantageInput(batch.token_rewards, batch.groups[:1], batch.sequences)
    alone = AdvantageInput(torch.ones(1), torch.tensor([7]), Sequences.from_lengths([1]))
    with pytest.raises(ValueError, match="group 7 has 1"):
        ADVANTAGES["grpo_passk"](alone, AdvantageConfig())
    with pytest.raises(ValueError, match="at least 2 tokens"):
        ADVANTAGES["reinforce_plus_plus"](alone, AdvantageConfig())


def _batch(dtype: torch.dtype = torch.float64) -> AdvantageInput:
    torch.manual_seed(5)
    lengths = [3, 1, 4, 2, 2]
    return AdvantageInput(
        token_rewards=torch.randn(sum(lengths), dtype=dtype),
        groups=torch.tensor([4, 4, 2, 2, 2]),
        sequences=Sequences.from_lengths(lengths),
        values=torch.randn(sum(lengths), dtype=dtype),
        baseline=torch.randn(len(lengths), dtype=dtype),
        logprobs=-torch.rand(sum(lengths), dtype=dtype),
        behavior_logprobs=-torch.rand(sum(lengths), dtype=dtype),
        components=torch.randn(len(lengths), 2, dtype=dtype),
        anchors=torch.tensor([0, 0, 1, 1, 2, 0, 2, 1, 1, 2, 0, 1]),
    )


def _turned(batch: AdvantageInput) -> AdvantageInput:
    lengths = batch.sequences.lengths.tolist()

    def turn(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat(tokens.split(lengths)[::-1])

    assert batch.values is not None
    assert batch.baseline is not None
    assert batch.logprobs is not None
    assert batch.behavior_logprobs is not None
    assert batch.components is not None
    assert batch.anchors is not None
    return AdvantageInput(
        turn(batch.token_rewards),
        batch.groups.flip(0),
        Sequences.from_lengths(lengths[::-1]),
        turn(batch.values),
        batch.baseline.flip(0),
        turn(batch.logprobs),
        turn(batch.behavior_logprobs),
        components=batch.components.flip(0),
        anchors=turn(batch.anchors),
    )


def test_gae_discounts_a_later_error_by_gamma_and_lambda() -> None:
    rewards = torch.tensor([0.0, 1.0]).double()
    batch = AdvantageInput(
        rewards, torch.tensor([0]), Sequences.from_lengths([2]), values=torch.zeros(2)
    )
    config = AdvantageConfig(gamma=0.5, lam=0.5, whiten=False)
    assert estimate_advantages("gae", batch, config).tolist() == [0.25, 1.0]
