"""Promises of reward shaping, weights and resampling beyond the recorded vectors."""

import json

import pytest
import torch

from streamrl.algorithms.reward_shaping import (
    RunningMoments,
    difficulty_mask,
    normalize,
    normalize_agentic,
    overlong_penalty,
    pf_ppo_chances,
    pf_ppo_resample,
    sample_weights,
    shape_rewards,
    token_rewards,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rewards import (
    AgenticNormalizationSettings,
    LengthRewardSettings,
    PfPpoSettings,
    RewardShapingSettings,
    SampleWeightSettings,
)


def test_running_moments_survive_a_checkpoint_and_cover_all_rewards_seen() -> None:
    torch.manual_seed(0)
    rewards = torch.randn(3, 10, dtype=torch.float64)
    running = RunningMoments()
    running.update(rewards[0])
    running.update(rewards[1])
    restored = RunningMoments()
    restored.load_state_dict(json.loads(json.dumps(running.state_dict())))
    restored.update(rewards[2])
    assert restored.mean == pytest.approx(float(rewards.mean()))
    assert restored.std == pytest.approx(float(rewards.std()))


def test_shaping_happens_in_the_documented_order() -> None:
    """Penalty, then normalization, then clip, then length."""
    config = RewardShapingSettings(
        format_penalty=1.0,
        norm_mean="batch",
        clip=1.0,
        length=LengthRewardSettings(max_length=8, buffer=4, penalty=0.5),
    )
    rewards = torch.tensor([4.0, 4.0, 4.0])
    shaped, metrics = shape_rewards(
        rewards,
        torch.zeros(3).long(),
        Sequences.from_lengths([4, 6, 9]),
        config,
        RunningMoments(),
        num_invalid_turns=torch.tensor([0, 0, 6]),
        is_truncated=torch.zeros(3),
    )
    # 4, 4, -2 less their mean 2, clipped to 1, less the penalty for length.
    assert shaped.tolist() == [1.0, 0.75, -1.5]
    assert metrics["reward/clipped_frac"] == 1.0
    assert metrics["reward/overlong_penalty"] == pytest.approx(0.25)


def test_agentic_normalization_replaces_the_scopes() -> None:
    config = RewardShapingSettings(agentic=AgenticNormalizationSettings(method="mean"))
    rewards, groups = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1])
    sequences, none = Sequences.from_lengths([1, 1, 1]), torch.zeros(3)
    shaped, _ = shape_rewards(rewards, groups, sequences, config, RunningMoments(), none, none)
    assert shaped.tolist() == [-1.0, 1.0, 0.0]


def test_agentic_methods() -> None:
    scores, groups = torch.tensor([0.0, 0.0, 0.0, 9.0, 2.0, 7.0]), torch.tensor([0, 0, 0, 0, 1, 2])
    assert torch.equal(normalize_agentic(scores, groups, "identity"), scores)
    standard = normalize_agentic(scores, groups, "mean_std")
    torch.testing.assert_close(standard, torch.tensor([-0.5, -0.5, -0.5, 1.5, 0.0, 0.0]))
    clipped = normalize_agentic(torch.tensor([0.0] * 12 + [9.0]), torch.zeros(13), "asym_clip")
    assert float(clipped.max()) == 3.0
    same = normalize_agentic(torch.ones(4), torch.zeros(4), "mean_std")
    assert not same.any()


def test_scopes_combine_freely() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 9.0]), torch.tensor([0, 0, 1, 1])
    assert torch.equal(normalize(rewards, groups, None, None, RunningMoments()), rewards)
    shift = normalize(rewards, groups, "group", None, RunningMoments())
    assert shift.tolist() == [-1.0, 1.0, -2.0, 2.0]
    scale = normalize(rewards, groups, None, "batch", RunningMoments())
    torch.testing.assert_close(scale, rewards / rewards.std(), rtol=1e-5, atol=0)


def test_rewards_without_spread_are_not_divided_by_it() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1, 2])
    first = normalize(rewards, groups, "batch", "group", RunningMoments())
    assert first[[0, 1, 4]].tolist() == pytest.approx([0.2, 0.2, -0.8])
    assert (
        normalize(torch.ones(3), torch.zeros(3), None, "batch", RunningMoments()).tolist()
        == [1.0] * 3
    )


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    config = LengthRewardSettings(max_length=10, buffer=4)
    lengths = torch.tensor([0, 6, 7, 10, 99])
    assert overlong_penalty(lengths, config).tolist() == [0.0, 0.0, 0.25, 1.0, 1.0]


def test_rewards_stand_at_the_last_token_less_the_kl_of_each() -> None:
    sequences = Sequences.from_lengths([2, 0, 3])
    rewards = torch.tensor([1.0, 5.0, 2.0])
    assert token_rewards(rewards, sequences).tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]
    charged = token_rewards(rewards, sequences, kl=torch.ones(5), kl_coef=0.5)
    assert charged.tolist() == [-0.5, 0.5, -0.5, -0.5, 1.5]
    assert abs(float(token_rewards(rewards, sequences, whitened=True).mean())) < 1e-6


def test_groups_of_one_difficulty_are_not_trained_on() -> None:
    scores, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 2])
    assert difficulty_mask(scores, groups, 0.1, 0.9).tolist() == [False, False, True, True, True]
    assert difficulty_mask(scores, groups, None, None).all()


def test_sample_weights_have_mean_one_and_favor_the_hard_and_the_short() -> None:
    lengths = torch.tensor([1, 5, 9])
    by_length = sample_weights(lengths, SampleWeightSettings(length=True), torch.zeros(3))
    torch.testing.assert_close(by_length, torch.tensor([1.5, 1.0, 0.5], dtype=torch.float64))
    hard = torch.tensor([0.0, 0.5, 2.0])
    by_difficulty = sample_weights(lengths, SampleWeightSettings(difficulty=True), hard)
    assert float(by_difficulty.mean()) == pytest.approx(1.0)
    assert by_difficulty.tolist() == sorted(by_difficulty.tolist())
    assert sample_weights(lengths, SampleWeightSettings(), hard).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "chances"),
    [
        ("pow", [4.0, 1.0, 0.0, 4.0]),
        ("max_min", [1.0, 0.0, 0.0, 1.0]),
        ("max_random", [0.1, 0.1, 0.1, 0.4]),
    ],
)
def test_pf_ppo_draws_by_the_chances_of_its_method(method: str, chances: list[float]) -> None:
    scores = torch.tensor([-2.0, 1.0, 0.0, 2.0])
    config = PfPpoSettings(method=method)
    torch.testing.assert_close(pf_ppo_chances(scores, config), torch.tensor(chances) + 1e-8)
    torch.manual_seed(0)
    draws = torch.cat([pf_ppo_resample(scores, config) for _ in range(500)])
    shares = torch.bincount(draws, minlength=4) / len(draws)
    expected = torch.tensor(chances) / sum(chances)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.04)
