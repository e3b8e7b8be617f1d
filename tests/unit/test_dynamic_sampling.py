"""Groups that teach nothing are left out under a bound; siblings beyond the group are counted."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from actors.concurrency import first_finished
from actors.dynamic_sampling import UniformFilter
from actors.episodes.group import first_of_each, unbuffered_lease
from buffers.audit import audit
from buffers.ledger.entries import Event
from streamrl.config.algorithm.settings import AlgorithmSettings
from streamrl.config.generator import OversampleSettings
from streamrl.config.loading.load import load_config
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Episode
from streamrl.types import DropReason, TrajectoryGroup
from tests.records import make_trajectory
from tests.unit.test_generator import Run


def group(*rewards: float) -> TrajectoryGroup:
    trajectories = tuple(make_trajectory(reward=reward) for reward in rewards)
    return TrajectoryGroup(group_id="g", prompt_index=0, environment="e", trajectories=trajectories)


def settings(**values: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"dynamic_sampling": values})


def test_a_group_is_left_out_if_its_rewards_are_alike():
    chosen = UniformFilter(settings(), groups_per_step=8)
    assert chosen.leaves_out(group(1.0, 1.0, 1.0))
    assert chosen.leaves_out(group(0.1 + 0.2, 0.3))
    assert not chosen.leaves_out(group(1.0, 0.0, 1.0))
    assert not UniformFilter(AlgorithmSettings(), 8).leaves_out(group(1.0, 1.0))


@given(
    are_alike=st.lists(st.booleans(), max_size=200),
    max_refills=st.sampled_from([0.5, 1.0, 2.5, 9.0]),
    groups_per_step=st.integers(1, 8),
)
def test_no_more_are_left_out_than_the_bound_says(are_alike, max_refills, groups_per_step):
    chosen = UniformFilter(settings(max_refills=max_refills), groups_per_step)
    num_left_out = num_kept = 0
    for is_alike in are_alike:
        if chosen.leaves_out(group(1.0, 1.0 if is_alike else 0.0)):
            assert is_alike
            num_left_out += 1
        else:
            num_kept += 1
        assert num_left_out <= max_refills * (num_kept + groups_per_step)


def test_a_run_whose_groups_are_all_alike_trains_a_share_and_says_so(caplog):
    chosen = UniformFilter(settings(max_refills=3), groups_per_step=2)
    left_out = [chosen.leaves_out(group(0.0, 0.0)) for _ in range(6 + 40)]
    assert left_out == [True] * 6 + [False, True, True, True] * 10
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "of too many groups all siblings have one reward: one of 4 is trained nevertheless, as "
        "algorithm.dynamic_sampling.max_refills says"
    ]


def test_a_metric_of_the_environment_decides_if_it_is_named(caplog):
    chosen = UniformFilter(settings(metric="solved"), groups_per_step=2)

    def solved(*values: float) -> TrajectoryGroup:
        made = [make_trajectory(reward=float(i)) for i, _ in enumerate(values)]
        for trajectory, value in zip(made, values, strict=True):
            trajectory.metrics["solved"] = value
        return TrajectoryGroup(
            group_id="g", prompt_index=0, environment="e", trajectories=tuple(made)
        )

    assert chosen.leaves_out(solved(1.0, 1.0))
    assert not chosen.leaves_out(solved(1.0, 0.0))
    assert not caplog.records
    assert not chosen.leaves_out(group(1.0, 1.0))
    assert "environment e does not record 'solved'" in caplog.text


def test_the_rewards_that_gdpo_normalizes_by_themselves_are_compared_by_themselves():
    rewards = {"reward/math": 1.0, "reward/format": 0.5}
    own = {"advantage": "gdpo", "advantage_config": {"rewards": rewards}, "dynamic_sampling": {}}
    chosen = UniformFilter(AlgorithmSettings.model_validate(own), groups_per_step=8)

    def scored(*pairs: tuple[float, float]) -> TrajectoryGroup:
        made = group(*(1.0 for _ in pairs))
        for trajectory, (math, form) in zip(made.trajectories, pairs, strict=True):
            trajectory.metrics.update({"reward/math": math, "reward/format": form})
        return made

    assert not chosen.leaves_out(scored((1.0, 0.0), (0.5, 1.0)))
    assert chosen.leaves_out(scored((1.0, 0.0), (1.0, 0.0)))


class OddAreAlike:
    """Rewards differ for the siblings of an even prompt only."""

    async def score(self, episodes: Sequence[Episode]) -> list[float]:
        is_odd = int(episodes[0].prompt.answer) % 2
        return [1.0 if is_odd else float(i) for i, _ in enumerate(episodes)]


def with_dynamic_sampling(run: Run, **values: object) -> None:
    run.config = run.config.model_copy(update={"algorithm": settings(**values)})


async def test_the_prompts_that_follow_are_sampled_in_their_place_and_lengths_are_counted():
    run = Run()
    with_dynamic_sampling(run)
    run.runner = replace(run.runner, reward=OddAreAlike())
    events: list[Event] = []
    run.state.ledger.entries.subscribers.append(events.append)
    await run.learner.attach(0, None)
    async with run.generating():
        trained = []
        for version in range(3):
            await run.until(lambda: run.books.buffered >= 2)
            loan = await run.learner.take(2, version, 1.0)
            trained += [header.prompt_index for header in loan.headers]
            await run.learner.advance(version + 1)
            run.engine.policy_version = version + 1
    assert all(index % 2 == 0 for index in trained)
    assert len(trained) == 6
    num_left_out = run.books.dropped[DropReason.UNIFORM]
    assert num_left_out >= 3
    assert run.books.balanced
    counted = (await run.learner.stats()).lengths
    assert counted.dropped_because(DropReason.UNIFORM).num_responses == 2 * num_left_out
    assert counted.sampled.num_responses == 2 * (num_left_out + 6 + run.books.buffered)
    audited = audit(events).lengths
    assert audited.sampled.rounded() == counted.sampled
    assert audited.dropped[DropReason.UNIFORM].rounded() == counted.dropped[DropReason.UNIFORM]


async def test_a_generator_whose_groups_are_all_alike_goes_on():
    run = Run()
    with_dynamic_sampling(run, max_refills=2)
    await run.learner.attach(0, None)
    async with run.generating():
        for version in range(4):
            await run.train(version)
            run.engine.policy_version = version + 1
    assert 0 < run.books.dropped[DropReason.UNIFORM] <= 2 * (8 + 4 + 2)


@pytest.mark.parametrize(
    ("rewards", "count", "kept"),
    [
        ([0, 0, 0, 1], 2, [0, 3]),
        ([0, 0, 0, 1, 0, 1], 4, [0, 1, 3, 5]),
        ([0, 1, 2, 3], 2, [0, 1]),
        ([5, 5, 5, 5], 3, [0, 1, 2]),
        ([1, 1, 0, 0.5, 0], 4, [0, 1, 2, 3]),
    ],
)
def test_the_first_of_each_reward_are_kept(rewards, count, kept):
    assert first_of_each(rewards, count) == kept


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=16), st.data())
def test_every_reward_there_is_room_for_is_kept(rewards, data):
    count = data.draw(st.integers(1, len(rewards)))
    kept = first_of_each(rewards, count)
    assert len(set(kept)) == count
    assert kept == sorted(kept)
    assert len({rewards[i] for i in kept}) == min(count, len(set(rewards)))


async def test_the_first_that_finish_are_kept_and_the_others_are_canceled():
    gates = [asyncio.Event() for _ in range(4)]
    canceled = []

    async def sibling(number: int) -> int:
        try:
            await gates[number].wait()
        except asyncio.CancelledError:
            canceled.append(number)
            raise
        return number

    running = asyncio.create_task(first_finished(map(sibling, range(4)), 2))
    for number in (3, 1):
        await asyncio.sleep(0)
        gates[number].set()
    assert await running == [None, 1, None, 3]
    assert canceled == [0, 2]


async def test_a_sibling_that_fails_before_enough_have_finished_ends_them_all():
    async def sibling(number: int) -> int:
        if number == 1:
            raise RolloutError("no luck")
        await asyncio.Event().wait()
        return number

    with pytest.raises(RolloutError, match="no luck"):
        await first_finished(map(sibling, range(3)), 2)


class CountingReward:
    def __init__(self) -> None:
        self.num_scored = 0

    async def score(self, episodes: Sequence[Episode]) -> list[float]:
        self.num_scored = len(episodes)
        return [float(i >= 3) for i, _ in enumerate(episodes)]


async def test_siblings_beyond_the_group_are_scored_and_their_lengths_recorded():
    reward = CountingReward()
    oversample = OversampleSettings(num_siblings=2)
    runner = replace(Run().runner, reward=reward, oversample=oversample)
    made = await runner.run(unbuffered_lease("test", 3))
    assert reward.num_scored == 4
    assert [t.reward for t in made.trajectories] == [0.0, 1.0]
    assert made.discarded_lengths == (2, 2)
    assert made.sampled_lengths == (2, 2, 2, 2)


async def test_siblings_that_others_overtake_are_recorded_with_what_they_had():
    run = Run()
    run.engine.at_stop = 7
    numbers = itertools.count()
    generate = run.engine.generate

    async def slow_first(*arguments: object) -> object:
        if next(numbers) == 0:
            arguments[2].num_tokens = 7
            await asyncio.Event().wait()
        return await generate(*arguments)

    run.engine.generate = slow_first
    oversample = OversampleSettings(num_siblings=1, keep="first_finished")
    made = await replace(run.runner, oversample=oversample).run(unbuffered_lease("test", 3))
    assert len(made.trajectories) == 2
    assert made.discarded_lengths == (7,)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["algorithm.dynamic_sampling={}", "generator.group_size=1", "algorithm.advantage=gpg"],
            "algorithm.dynamic_sampling leaves out groups whose siblings are alike",
        ),
        (
            [
                "generator.oversample={num_siblings: 2, keep: first_finished}",
                "algorithm.advantage=remax",
            ],
            "algorithm.advantage remax needs a greedy completion of each prompt",
        ),
        (
            ["algorithm.dynamic_sampling={max_refills: 0}"],
            "algorithm.dynamic_sampling.max_refills: was 0; input should be greater than 0",
        ),
        (["generator.oversample={keep: fastest}"], "generator.oversample.keep: was 'fastest'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config("configs/quickstart.yaml", overrides, {})
    assert sentence in str(caught.value)
