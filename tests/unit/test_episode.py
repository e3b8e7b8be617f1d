"""What a limit cuts off: the episode is recorded with what was sampled, and as truncated."""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from actors.episodes.episode import EpisodeRun
from actors.episodes.group import GroupProgress
from streamrl.errors import RolloutError
from streamrl.interfaces import (
    CompletionHandle,
    EnvironmentContext,
    Episode,
    Observation,
    Transition,
)
from streamrl.types import Completion, FinishReason, SamplingParams, TrajectoryGroup
from tests.records import lease_one
from tests.rollouts import trajectories_of
from tests.unit.test_generator import CountingEnvironment, FakeEngine, FakeRenderer, Prompts, Run

SAMPLING = SamplingParams(max_new_tokens=4)
DEADLINE_S = 0.3


class HalfSlowEngine(FakeEngine):
    """Every second request is sampled until it is stopped."""

    def __init__(self, at_stop: int) -> None:
        super().__init__()
        self.at_stop = at_stop
        self.is_sampling = asyncio.Event()
        self._numbers = itertools.count()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        if next(self._numbers) % 2:
            self.is_sampling.set()
            await handle.stop.wait()
            return self._completion(prompt, self.at_stop, FinishReason.DEADLINE)
        return await super().generate(prompt, sampling, handle)


class SilentEngine(FakeEngine):
    """Samples two tokens at once for the first request, and nothing for any other, ever."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        if next(self._numbers):
            await asyncio.Event().wait()
        return await super().generate(prompt, sampling, handle)


class HangingEnvironment(CountingEnvironment):
    """Answers the first completion and no other."""

    async def step(self, completion: Completion) -> Transition:
        transition = await super().step(completion)
        if self._turn == 2:
            await asyncio.Event().wait()
        return transition


async def group_of(run: Run, **changes: object) -> TrajectoryGroup:
    runner = dataclasses.replace(run.runner, **changes)
    await run.learner.attach(0, None)
    async with asyncio.timeout(120):
        return await runner.run(await lease_one(run.learner, "a", "g", 0.0))


def episode(engine: FakeEngine, make_environment=CountingEnvironment, **limits) -> EpisodeRun:
    limits = {"max_model_len": 100, "deadline_s": 60.0, **limits}
    return EpisodeRun(engine, make_environment, **limits)


def context() -> EnvironmentContext:
    return EnvironmentContext(Prompts()[0], (7,), FakeRenderer())


async def test_a_sibling_at_its_deadline_keeps_its_tokens_and_the_others_are_not_touched():
    run = Run()
    group = await group_of(run, engine=HalfSlowEngine(at_stop=3), deadline_s=DEADLINE_S)
    whole, cut = group.trajectories
    assert (whole.finish_reason, whole.token_ids.tolist()) == (FinishReason.STOP, [7, 1, 1])
    assert (cut.finish_reason, cut.token_ids.tolist()) == (FinishReason.DEADLINE, [7, 1, 1, 1])
    assert cut.turns[0].finish_reason is FinishReason.DEADLINE
    assert [t.reward for t in group.trajectories] == [len("1 1"), len("1 1 1")]


async def test_a_greedy_sibling_at_its_deadline_is_scored():
    run = Run()
    run.engine.open.clear()
    run.engine.at_stop = 1
    group = await group_of(run, deadline_s=DEADLINE_S, with_greedy_reward=True)
    assert [t.metrics["greedy_reward"] for t in group.trajectories] == [len("1")] * 2


async def test_the_reward_has_its_own_time_after_the_deadline_of_the_episodes():
    run = Run()
    run.engine.open.clear()
    run.engine.at_stop = 1
    loop = asyncio.get_running_loop()
    scored_at_s: list[float] = []

    class NotingReward:
        async def score(self, episodes: Sequence[Episode]) -> list[float]:
            await asyncio.sleep(0)
            scored_at_s.append(loop.time())
            return [0.0] * len(episodes)

    began_s = loop.time()
    group = await group_of(run, deadline_s=DEADLINE_S, reward=NotingReward())
    assert scored_at_s[0] >= began_s + DEADLINE_S
    assert {t.finish_reason for t in group.trajectories} == {FinishReason.DEADLINE}


@pytest.mark.parametrize("at_stop", [0, 2])
async def test_what_was_sampled_in_earlier_turns_is_kept(at_stop: int):
    engine = HalfSlowEngine(at_stop)
    running = episode(engine)
    ending = asyncio.create_task(running.run(context(), SAMPLING))
    async with asyncio.timeout(120):
        await engine.is_sampling.wait()
        running._stop.set()
        rollout = await ending
    assert rollout.finish_reason is FinishReason.DEADLINE
    ids = [s.token_ids.tolist() for s in rollout.segments[0].spans]
    assert ids == [[7], [1, 1], *([[9], [4, 4]] if at_stop else [])]


async def test_an_environment_that_hangs_in_a_step_ends_the_episode_with_what_was_sampled():
    rollout = await episode(FakeEngine(), HangingEnvironment, deadline_s=DEADLINE_S).run(
        context(), SAMPLING
    )
    assert rollout.finish_reason is FinishReason.DEADLINE
    assert [turn.finish_reason for turn in rollout.turns] == [FinishReason.STOP] * 2
    assert [turn.num_tool_calls for turn in rollout.turns] == [1, 0]
    assert [s.token_ids.tolist() for s in rollout.segments[0].spans] == [[7], [1, 1], [9], [4, 4]]


async def test_an_engine_that_does_not_answer_a_stop_costs_its_turn_alone():
    engine = SilentEngine()
    rollout = await episode(engine, deadline_s=DEADLINE_S).run(context(), SAMPLING)
    assert (rollout.finish_reason, len(rollout.turns)) == (FinishReason.DEADLINE, 1)
    with pytest.raises(RolloutError, match=r"no token .*\.group_deadline_s, which is 0\.3 s"):
        await episode(engine, deadline_s=DEADLINE_S).run(context(), SAMPLING)


async def test_no_turn_begins_after_the_deadline():
    class StoppingEnvironment(CountingEnvironment):
        async def step(self, completion: Completion) -> Transition:
            running._stop.set()
            return await super().step(completion)

    running = episode(FakeEngine(), StoppingEnvironment)
    rollout = await running.run(context(), SAMPLING)
    assert (rollout.finish_reason, len(rollout.turns)) == (FinishReason.DEADLINE, 1)


async def test_an_episode_that_ends_at_its_deadline_by_itself_is_not_truncated():
    class EndingEnvironment:
        async def start(self, context: EnvironmentContext) -> Observation:
            return Observation(token_ids=context.prompt_token_ids)

        async def step(self, completion: Completion) -> Transition:
            running._stop.set()
            return Transition(done=True)

        async def close(self) -> None:
            pass

    running = episode(FakeEngine(), EndingEnvironment)
    assert (await running.run(context(), SAMPLING)).finish_reason is FinishReason.STOP


async def test_an_episode_that_fills_the_context_is_truncated_whatever_its_last_turn_ended_with():
    rollout = await episode(FakeEngine(), max_model_len=7).run(context(), SAMPLING)
    assert rollout.turns[-1].finish_reason is FinishReason.STOP
    assert (rollout.finish_reason, len(rollout.turns)) == (FinishReason.LENGTH, 2)
    (trajectory,) = trajectories_of(rollout)
    assert trajectory.finish_reason is FinishReason.LENGTH


class AnsweringEnvironment(CountingEnvironment):
    """Answers with a message."""

    async def step(self, completion: Completion) -> Transition:
        transition = await super().step(completion)
        answer = Observation(messages=({"role": "user", "content": "xyz"},))
        return dataclasses.replace(transition, observation=answer)


async def test_messages_after_a_completion_are_encoded_as_a_reply_to_it():
    class ReplyRenderer(FakeRenderer):
        def encode_reply(self, messages, completion_token_ids, tools=()):
            assert tuple(completion_token_ids[:1]) in [(1,), (5,)]
            return (30 + len(completion_token_ids), len(messages[0]["content"]))

    start = dataclasses.replace(context(), renderer=ReplyRenderer())
    rollout = await episode(FakeEngine(), AnsweringEnvironment).run(start, SAMPLING)
    assert rollout.segments[0].token_ids == (7, 1, 1, 32, 3, 5, 5, 32, 3, 9, 9)


def test_what_counts_as_truncated():
    truncated = [reason for reason in FinishReason if reason.is_truncated]
    assert truncated == [FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.MAX_TURNS]


async def test_the_tokens_of_the_longest_sibling_are_known_while_it_is_sampled():
    engine = FakeEngine()
    engine.open.clear()
    first, second = episode(engine), episode(engine)
    progress = GroupProgress(episodes=[first, second])
    assert (GroupProgress().num_tokens, progress.num_tokens) == (-1, -1)
    engine.at_stop = 5
    running = asyncio.create_task(first.run(context(), SAMPLING))
    async with asyncio.timeout(120):
        while progress.num_tokens != 5:
            await asyncio.sleep(0)
    engine.at_stop = 3
    engine.open.set()
    await running
    assert (first.num_tokens, second.num_tokens, progress.num_tokens) == (6, -1, 6)
