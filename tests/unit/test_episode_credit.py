"""Credit of episodes: segments share it, turns may have rewards of their own, and what the
environment leaves out of the loss is not trained."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from learners.batch.training_batch import TrainingBatch
from learners.objective.credit import CreditAssigner, CreditAssignment
from learners.parallel.ranks import Ranks
from learners.trainer import Trainer
from streamrl.algorithms.advantages import ADVANTAGES
from streamrl.errors import ConfigError
from streamrl.types import FinishReason, Media, Trajectory, TrajectoryGroup, Turn
from tests.training import make_config, make_groups, make_policy, segmented, with_metrics

CASES: dict[str, dict[str, Any]] = {
    # To gigpo a segment is a turn of its own, that answered its own prompt.
    **{name: {"advantage": name} for name in ADVANTAGES if name != "gigpo"},
    "gdpo": {"advantage": "gdpo", "advantage_config": {"rewards": {"place": 1.0, "late": 0.5}}},
    "length penalty": {"reward": {"length": {"max_length": 10, "buffer": 8}}},
    "normalized": {"reward": {"norm_mean": "batch", "norm_std": "running"}},
    "weights": {"sample_weight": {"length": True, "difficulty": True}},
    "easy ones masked": {"reward": {"difficulty_high": 0.5}},
}


def groups() -> list[TrajectoryGroup]:
    return [
        with_metrics(group, greedy_reward=0.2, difficulty=0.1 * i, place=i, late=i % 2)
        for i, group in enumerate(make_groups())
    ]


def credit(algorithm: Mapping[str, Any], batch: TrainingBatch) -> CreditAssignment:
    config = make_config(algorithm=algorithm).algorithm
    values = torch.linspace(-1, 1, batch.sequences.num_tokens) if config.needs_values else None
    proximal = -torch.linspace(0.1, 2, batch.sequences.num_tokens)
    logprobs = proximal if config.needs_ratios else None
    return CreditAssigner(config).assign(batch, logprobs, values=values)


@pytest.mark.parametrize("name", CASES)
def test_segments_have_the_credit_of_their_episode(name: str):
    whole = TrainingBatch.of(groups(), policy_version=4)
    parts = TrainingBatch.of(list(map(segmented, groups())), policy_version=4)
    assert len(parts) > len(whole) == len(parts.episodes)
    expected, found = credit(CASES[name], whole), credit(CASES[name], parts)
    assert torch.equal(found.advantages, expected.advantages)
    assert found.metrics == expected.metrics
    if name == "easy ones masked":
        assert not expected.loss_mask.all()
        assert torch.equal(found.loss_mask, expected.loss_mask)
    if name == "weights":
        shared = parts.episodes.to_trajectories(expected.sample_weights)
        assert torch.equal(found.sample_weights, shared)


def test_metrics_count_episodes():
    config = make_config(algorithm={"advantage": "grpo"})
    found = Trainer(config, make_policy()).step(TrainingBatch.of(list(map(segmented, groups())), 4))
    expected = Trainer(config, make_policy()).step(TrainingBatch.of(groups(), 4))
    for name in expected:
        if name.startswith(("reward/", "response_length/", "advantage/")):
            assert found[name] == expected[name], name


def test_resampling_draws_whole_episodes():
    batch = TrainingBatch.of(list(map(segmented, groups())), policy_version=4)
    members = batch.episodes.members(torch.tensor([2, 0, 2]))
    assert members == [
        *range(*bounds(batch, 2)),
        *range(*bounds(batch, 0)),
        *range(*bounds(batch, 2)),
    ]
    last = len(batch.episodes) - 1
    assert batch.episodes.members(torch.tensor([last]))[-1] == len(batch) - 1


def bounds(batch: TrainingBatch, episode: int) -> tuple[int, int]:
    chosen = (batch.episodes.of_trajectory == episode).nonzero()[:, 0].tolist()
    return chosen[0], chosen[-1] + 1


def trajectory_of_turns(rewards: list[float], reward: float) -> Trajectory:
    """A prompt token, then two tokens for each turn with an observed one between the turns."""
    mask = np.array([False, *([True, True, False] * len(rewards))[:-1]])
    turn = Turn(num_observation_tokens=1, num_completion_tokens=2, finish_reason=FinishReason.STOP)
    return Trajectory(
        token_ids=np.arange(2, 2 + len(mask), dtype=np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
        finish_reason=FinishReason.STOP,
        turns=tuple(structs.replace(turn, reward=given) for given in rewards),
    )


def batch_of(*trajectories: Trajectory, media: tuple[Media, ...] = ()) -> TrainingBatch:
    group = TrajectoryGroup(
        group_id="a",
        prompt_index=0,
        environment="test",
        trajectories=trajectories,
        media=media,
    )
    return TrainingBatch.of([group], policy_version=0)


def test_turns_that_answered_the_same_tokens_are_compared():
    """Both first turns answered one prompt, and nobody else the other observations of the second
    episode; rewards are discounted by turns, from where they were given."""
    whole, other = (trajectory_of_turns([1.0, 0.0, given], reward=given) for given in (4.0, 2.0))
    token_ids = other.token_ids.copy()
    token_ids[~other.response_mask] += np.array([0, 50, 50], np.int32)
    batch = batch_of(whole, structs.replace(other, token_ids=token_ids))
    anchors = batch.anchors(Ranks()).view(2, 3, 2)
    assert (anchors[..., 0] == 0).all()
    assert (anchors[..., 1] != 0).all()
    assert torch.equal(anchors[0, :, 1] == anchors[1, :, 1], torch.tensor([True, False, False]))
    given = {"advantage_config": {"turn_gamma": 0.5}, "reward": {"placement": "turn"}}
    found = credit({"advantage": "gigpo", **given}, batch).advantages.view(2, 6)
    # The episode's advantage is +-sqrt(1/2), and that of the first turn the same.
    sign = torch.tensor([[1.0], [-1.0]])
    expected = sign * 0.5**0.5 * torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_turn_of_an_episode_with_pictures_is_compared_with_none():
    picture = Media.image(b"a")
    seen = structs.replace(trajectory_of_turns([1.0, 0.0], reward=1.0), media=(picture.id,))
    anchors = batch_of(seen, seen, media=(picture,)).anchors(Ranks())
    assert len(anchors.unique()) == 5


def test_a_reward_that_no_environment_records_is_named():
    algorithm = {"advantage": "gdpo", "advantage_config": {"rewards": {"plase": 1.0}}}
    with pytest.raises(ConfigError, match=r"names 'plase', which .* did you mean 'place'"):
        credit(algorithm, TrainingBatch.of(groups(), policy_version=4))


def test_an_episode_that_a_limit_cut_lacks_what_the_environment_would_have_recorded():
    """Its rewards count 0; of one that ended by itself they must be there."""
    first, *others = groups()
    cut = structs.replace(first.trajectories[0], metrics={}, finish_reason=FinishReason.DEADLINE)
    zero = structs.replace(cut, metrics={"place": 0.0, "late": 0.0})
    algorithm = {"advantage": "gdpo", "advantage_config": {"rewards": {"place": 1.0, "late": 0.5}}}

    def found(trajectory: Trajectory) -> torch.Tensor:
        group = structs.replace(first, trajectories=(trajectory, *first.trajectories[1:]))
        return credit(algorithm, TrainingBatch.of([group, *others], 4)).advantages

    torch.testing.assert_close(found(cut), found(zero), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="names 'place', which the environment did not record"):
        found(structs.replace(cut, finish_reason=FinishReason.STOP))


def played(*rewards: float, environment: str = "a") -> TrajectoryGroup:
    """An episode for each reward, whose role is 0 or 1 in turn."""
    whole = trajectory_of_turns([0.0], 0.0)
    return TrajectoryGroup(
        group_id=environment,
        prompt_index=0,
        environment=environment,
        trajectories=tuple(
            structs.replace(whole, reward=reward, metrics={"role": float(i % 2)})
            for i, reward in enumerate(rewards)
        ),
    )


OF_ROLES = {"advantage": "rae", "advantage_config": {"role": "role", "decay": 0.5}}


def test_roles_of_environments_have_baselines_that_go_on_where_a_checkpoint_was():
    config = make_config(algorithm=OF_ROLES).algorithm
    games = [played(1.0, -1.0, 1.0, -1.0), played(1.0, 0.0, environment="/b/games.py:Go")]
    first, second = (TrainingBatch.of(one, 0) for one in (games, games[::-1]))
    assigner = CreditAssigner(config)
    found = assigner.assign(first)
    assert found.advantages[::2].tolist() == [1.0, -1.0, 0.5, -0.5, 1.0, 0.0]
    names = {f"advantage/baseline/{role}" for role in ("a/0", "a/1", "games.py:Go/0")}
    assert {n: v for n, v in found.metrics.items() if n in names} == {
        "advantage/baseline/a/0": 0.75,
        "advantage/baseline/a/1": -0.75,
        "advantage/baseline/games.py:Go/0": 0.5,
    }
    resumed = CreditAssigner(config)
    resumed.load_state_dict(assigner.state_dict())
    expected = [0.5, 0.0, 0.25, -0.25, 0.125, -0.125]
    for one in (assigner, resumed):
        assert one.assign(second).advantages[::2].tolist() == expected


def test_without_a_role_an_environment_has_one_baseline():
    config = make_config(algorithm={"advantage": "rae", "advantage_config": {"decay": 0.5}})
    found = CreditAssigner(config.algorithm).assign(TrainingBatch.of([played(1.0, 1.0)], 0))
    assert found.advantages[::2].tolist() == [1.0, 0.5]
    assert found.metrics["advantage/baseline/a/all"] == 0.75


def test_an_episode_that_was_cut_before_it_had_a_role_ends_no_run():
    config, whole = make_config(algorithm=OF_ROLES).algorithm, played(1.0, -1.0)
    cut = structs.replace(whole.trajectories[0], metrics={})
    assigner = CreditAssigner(config)
    group = structs.replace(whole, trajectories=(cut, whole.trajectories[1]))
    found = assigner.assign(TrainingBatch.of([group], 0))
    assert found.advantages[::2].tolist() == [1.0, -1.0]
    assert assigner.state_dict()["baseline/a/all"] == 0.5
    # Nor does a batch of such alone, once it is known that there are roles.
    alone = TrainingBatch.of([structs.replace(whole, trajectories=(cut,))], 0)
    assert assigner.assign(alone).advantages[::2].tolist() == [0.5]
    with pytest.raises(ConfigError, match=r"config\.role: names 'role', .* of any episode"):
        CreditAssigner(config).assign(alone)


def test_what_a_batch_without_its_update_has_measured_is_in_no_checkpoint():
    trainer = Trainer(make_config(algorithm=OF_ROLES), make_policy())
    before = trainer.state_dict()
    batch = TrainingBatch.of([played(1.0, -1.0)], 0)
    trainer.accumulate(batch)
    assert trainer.state_dict() == before
    trainer.update()
    assert trainer.state_dict()["baseline/a/0"] == 0.5
    resumed = Trainer(make_config(algorithm=OF_ROLES), make_policy())
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.state_dict() == trainer.state_dict()


def test_a_role_that_nobody_records_is_named():
    algorithm = {**OF_ROLES, "advantage_config": {"role": "roll"}}
    with pytest.raises(ConfigError, match=r"config\.role: names 'roll', .* did you mean 'role'"):
        credit(algorithm, TrainingBatch.of([played(1.0)], policy_version=0))


@pytest.mark.parametrize("algorithm", [OF_ROLES, {"advantage": "maxrl"}])
@pytest.mark.parametrize("name", ["norm_mean", "agentic", "whiten"])
def test_rewards_that_have_lost_their_mean_are_refused_where_it_is_read(algorithm: Any, name: str):
    """Of siblings it is 0 up to rounding, which maxrl would divide by."""
    value = {"norm_mean": "group", "agentic": {}, "whiten": True}[name]
    with pytest.raises(ValueError, match=rf"algorithm\.reward\.{name} takes a mean from"):
        make_config(algorithm={**algorithm, "reward": {name: value}})


def test_maxrl_does_not_divide_by_the_noise_that_a_kl_leaves_where_nobody_succeeds():
    with pytest.raises(ValueError, match=r"kl_reward\.coef 0\.1 .* set algorithm\.kl_loss\.coef"):
        make_config(algorithm={"advantage": "maxrl", "kl_reward": {"coef": 0.1}})


def test_a_turns_reward_stands_at_its_end_and_the_rest_at_the_end_of_the_episode():
    batch = batch_of(trajectory_of_turns([1.0, 0.0, 4.0], reward=7.0))
    for placement, expected in (("turn", [7, 7, 6, 6, 6, 6]), ("episode", [7] * 6)):
        algorithm = {"advantage": "reinforce", "reward": {"placement": placement}}
        assert credit(algorithm, batch).advantages.tolist() == expected


def test_episodes_of_one_reward_have_no_advantage_however_their_turns_share_it():
    """In float32 the sums of such turns differ by rounding, of which a division by the standard
    deviation would make advantages of about 1."""
    shares = [[100 / n] * n for n in (10, 4, 3, 7)]
    batch = batch_of(*(trajectory_of_turns(own, reward=sum(own)) for own in shares))
    whole = {"advantage": "gigpo", "advantage_config": {"turn_gamma": 1.0}}
    found = credit({**whole, "reward": {"placement": "turn"}}, batch).advantages
    first_turns = found[[0, 20, 28, 34]]
    assert first_turns.dtype == torch.float32
    assert float(first_turns.abs().max()) < 1e-6


def test_turns_that_do_not_fit_the_tokens_leave_the_reward_at_the_end():
    odd = structs.replace(trajectory_of_turns([1.0, 2.0], reward=7.0), turns=())
    algorithm = {"advantage": "reinforce", "reward": {"placement": "turn"}}
    assert credit(algorithm, batch_of(odd)).advantages.tolist() == [7] * 4


def test_the_reward_of_a_turn_without_tokens_goes_to_the_next_ones():
    sampled = trajectory_of_turns([1.0, 0.0], reward=8.0)
    empty = structs.replace(sampled.turns[0], num_completion_tokens=0, reward=5.0)
    first = structs.replace(sampled, turns=(empty, *sampled.turns))
    none = structs.replace(trajectory_of_turns([], reward=5.0), turns=(empty,))
    algorithm = {"advantage": "reinforce", "reward": {"placement": "turn"}}
    assert credit(algorithm, batch_of(first, none)).advantages.tolist() == [8, 3, 2, 2]


def gradient(batch: TrainingBatch, **reward: object) -> dict[str, torch.Tensor]:
    """Of one step."""
    algorithm = {"advantage": "grpo", "reward": reward}
    config = make_config(optimizer={"max_grad_norm": None}, algorithm=algorithm)
    trainer = Trainer(config, make_policy())
    seen: dict[str, torch.Tensor] = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in trainer.policy.parameters().items()})
    )
    trainer.step(batch)
    return seen


def masked(trajectory: Trajectory, num_tokens: int, logprob: float = -0.5) -> Trajectory:
    """Without its first so many response tokens in the loss, which were sampled at `logprob`."""
    places = np.flatnonzero(trajectory.response_mask)[:num_tokens]
    mask, logprobs = trajectory.response_mask.copy(), trajectory.behavior_logprobs.copy()
    mask[places], logprobs[places] = False, logprob
    return structs.replace(trajectory, loss_mask=mask, behavior_logprobs=logprobs)


def test_a_turn_outside_the_loss_has_no_part_in_the_gradient():
    good, bad = (trajectory_of_turns([0.0, 0.0], reward) for reward in (1.0, 0.0))
    whole = gradient(batch_of(good, bad))
    part = gradient(batch_of(masked(good, 2), bad))
    assert any(not torch.allclose(whole[name], part[name], atol=1e-6) for name in whole)
    other = gradient(batch_of(masked(good, 2, logprob=-9.0), bad))
    assert all(torch.equal(part[name], other[name]) for name in part)
    # Without any of its tokens a trajectory counts as one does that a limit cut and that is masked.
    none = gradient(batch_of(masked(good, 4), bad))
    cut = structs.replace(good, finish_reason=FinishReason.LENGTH)
    expected = gradient(batch_of(cut, bad), truncated="mask")
    assert all(torch.equal(none[name], expected[name]) for name in expected)


def test_the_weight_of_the_kl_follows_that_of_the_batch():
    reward = {"coef": 0.1, "controller": "adaptive", "target": 0.1, "horizon": 100}
    config = make_config(algorithm={"advantage": "grpo", "kl_reward": reward})
    assigner, batch = CreditAssigner(config.algorithm), TrainingBatch.of(make_groups(), 4)
    logprobs = batch.behavior_logprobs
    assigner.assign(batch, logprobs, logprobs - 1.0)
    assert assigner.state_dict()["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * len(batch) / 100))
