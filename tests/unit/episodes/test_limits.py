"""Limits of turns and episodes, and what becomes of what they cut."""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from actors.episodes.episode import EpisodeRun
from actors.episodes.group import TruncatedGroupError, unbuffered_lease
from actors.episodes.mixed_runner import MixedRunner
from streamrl import wire
from streamrl.config.generator import EpisodeSettings
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext, Observation, Prompt, Score, Transition
from streamrl.types import (
    Completion,
    DropReason,
    FinishReason,
    PackedGroup,
    SamplingParams,
    pack,
)
from tests.unit.episodes.environments import Turns
from tests.unit.test_generator import FakeEngine, FakeRenderer, Prompts, Run
from tests.waiting import LoopClock

SAMPLING = SamplingParams(max_new_tokens=4)
DEADLINE_S = 0.2


def episode(engine: FakeEngine, make_environment=Turns, **settings: object) -> EpisodeRun:
    return EpisodeRun(
        engine,
        make_environment,
        max_model_len=100,
        deadline_s=60.0,
        settings=EpisodeSettings.model_validate(settings),
    )


def context() -> EnvironmentContext:
    return EnvironmentContext(Prompts()[0], (7,), FakeRenderer())


async def test_an_episode_that_goes_on_after_max_turns_is_truncated():
    rollout = await episode(FakeEngine(), max_turns=2).run(context(), SAMPLING)
    assert (len(rollout.turns), rollout.finish_reason) == (2, FinishReason.MAX_TURNS)
    assert rollout.finish_reason.is_truncated
    assert rollout.metrics["num_turns"] == 2


async def test_an_episode_that_ends_with_its_last_turn_is_not_truncated():
    rollout = await episode(FakeEngine(), max_turns=3).run(context(), SAMPLING)
    assert (len(rollout.turns), rollout.finish_reason) == (3, FinishReason.STOP)


class SlowStep(Turns):
    """Hangs in its second step."""

    async def step(self, completion: Completion) -> Transition:
        if self.turn == 1:
            await asyncio.Event().wait()
        return await super().step(completion)


async def test_a_turn_whose_environment_exceeds_its_limit_ends_the_episode_with_what_it_has():
    running = episode(FakeEngine(), SlowStep, turn_deadline_s=DEADLINE_S)
    async with asyncio.timeout(120):
        rollout = await running.run(context(), SAMPLING)
    assert (len(rollout.turns), rollout.finish_reason) == (2, FinishReason.DEADLINE)
    assert rollout.metrics["environment_wait_s"] >= DEADLINE_S


async def test_a_turn_whose_completion_exceeds_its_limit_keeps_the_tokens_that_it_has():
    engine = FakeEngine()
    engine.open.clear()
    engine.at_stop = 3
    async with asyncio.timeout(120):
        rollout = await episode(engine, turn_deadline_s=DEADLINE_S).run(context(), SAMPLING)
    assert rollout.segments[0].token_ids == (7, 1, 1, 1)
    assert rollout.finish_reason is FinishReason.DEADLINE


async def test_each_turn_has_the_whole_limit(monkeypatch):
    limit_s, clock = 20.0, LoopClock(monkeypatch)

    class Pausing(Turns):
        num_turns = 5

        async def step(self, completion: Completion) -> Transition:
            clock.ahead_s += limit_s / 2
            await asyncio.sleep(0.001)
            return await super().step(completion)

    rollout = await episode(FakeEngine(), Pausing, turn_deadline_s=limit_s).run(context(), SAMPLING)
    assert (len(rollout.turns), rollout.finish_reason) == (5, FinishReason.STOP)


async def test_without_a_token_the_limit_of_the_turn_is_named():
    engine = FakeEngine()
    engine.open.clear()
    sentence = r"no token .* generator\.episode\.turn_deadline_s, which is 0\.2 s"
    with pytest.raises(RolloutError, match=sentence):
        await episode(engine, turn_deadline_s=DEADLINE_S).run(context(), SAMPLING)

    class SlowStart(Turns):
        async def start(self, context: EnvironmentContext) -> Observation:
            await asyncio.Event().wait()

    with pytest.raises(RolloutError, match=sentence):
        await episode(FakeEngine(), SlowStart, turn_deadline_s=DEADLINE_S).run(context(), SAMPLING)


async def test_without_a_token_the_limit_of_the_group_is_named_where_it_came_first():
    engine = FakeEngine()
    engine.open.clear()
    begun = episode(engine, turn_deadline_s=60.0)
    begun.deadline_s = DEADLINE_S
    with pytest.raises(RolloutError, match=r"generator\.group_deadline_s, which is 0\.2 s"):
        await begun.run(context(), SAMPLING)


class LongerByIndex(Turns):
    """The episode with index i has i + 1 turns."""

    async def start(self, context: EnvironmentContext) -> Observation:
        self.num_turns = context.episode_index + 1
        return await super().start(context)


def dropping(run: Run, group_size: int, max_turns: int):
    settings = EpisodeSettings(max_turns=max_turns, truncated="drop")
    return dataclasses.replace(
        run.runner, make_environment=LongerByIndex, group_size=group_size, settings=settings
    )


async def test_truncated_siblings_are_left_out_and_their_tokens_counted():
    group = await dropping(Run(), 4, 2).run(unbuffered_lease("test", 0))
    assert [len(t.turns) for t in group.trajectories] == [1, 2]
    assert {t.finish_reason for t in group.trajectories} == {FinishReason.STOP}
    assert group.discarded_lengths == (4, 4)


async def test_a_group_with_too_few_others_is_dropped():
    with pytest.raises(TruncatedGroupError) as caught:
        await dropping(Run(), 4, 1).run(unbuffered_lease("test", 0))
    assert caught.value.lengths == [2, 2, 2, 2]
    alone = await dropping(Run(), 1, 1).run(unbuffered_lease("test", 0))
    assert len(alone.trajectories) == 1


async def test_held_out_prompts_are_scored_however_their_responses_end():
    runner = dropping(Run(), 4, 1)
    single = MixedRunner(runner.engine, None, {"only": runner}).single().runners["only"]
    group = await single.run(unbuffered_lease("test", 0))
    assert [t.finish_reason for t in group.trajectories] == [FinishReason.STOP]
    longer = dataclasses.replace(single, make_environment=Turns)
    group = await longer.run(unbuffered_lease("test", 0))
    assert [t.finish_reason for t in group.trajectories] == [FinishReason.MAX_TURNS]


async def test_a_dropped_group_is_counted_as_filtered():
    run = Run(episode={"truncated": "drop"})
    run.runner = dropping(run, 2, 1)
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.dropped.get(DropReason.FILTERED, 0) >= 3)
    assert run.books.buffered == 0
    assert run.books.balanced


class Extracting:
    async def score(self, episodes):
        return [Score(1.0, extracted="7"), *(0.0 for _ in episodes[1:])]


@pytest.mark.parametrize(
    ("answer", "row", "kept"),
    [
        ("9", {}, "9"),
        ("", {"reward_model": {"ground_truth": "8"}}, "8"),
        ("a" * 9000, {}, f"{'a' * 96} [...] {'a' * 96}"),
        ("half \ud800", {}, "half ?"),
        ("", {"reward_model": {"ground_truth": ["1", "2"]}}, "['1', '2']"),
    ],
)
async def test_a_group_has_the_expected_answer_and_what_was_extracted(answer, row, kept):
    prompts = {0: Prompt("x", answer, row)}
    runner = dataclasses.replace(Run().runner, prompts=prompts, reward=Extracting())
    group = await runner.run(unbuffered_lease("test", 0))
    group = wire.decode(wire.encode(pack(group)), PackedGroup).group()
    assert group.answer == kept
    assert [t.extracted for t in group.trajectories] == ["7", None]


async def test_the_conversation_reaches_the_reward():
    seen: list[Sequence[object]] = []

    class Reading:
        async def score(self, episodes):
            seen.extend(episode.messages for episode in episodes)
            return [0.0] * len(episodes)

    runner = dataclasses.replace(Run().runner, make_environment=Turns, reward=Reading())
    await runner.run(unbuffered_lease("test", 0))
    assert seen[0] == (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "1 1"},
        {"role": "user", "content": "9"},
        {"role": "assistant", "content": "4 4"},
        {"role": "user", "content": "9"},
        {"role": "assistant", "content": "7 7"},
    )
