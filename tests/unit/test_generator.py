"""The generator keeps its leases' promises whatever its engine, its reward and the buffer do."""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from actors import version_gate
from actors.engines.weight_targets import WeightTarget
from actors.environments import SingleTurn
from actors.episodes.group import GroupProgress, GroupRunner
from actors.failures import FailureRecord
from actors.generator import Generator
from actors.leased_group import LeasedGroup
from actors.status_report import Occupancy, StatusReport, TokenRate
from actors.version_gate import StarvedLeases, VersionGate
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.errors import CorruptMessageError, RolloutError, WeightTransferError
from streamrl.interfaces import (
    CompletionHandle,
    EnvironmentContext,
    Episode,
    Message,
    Observation,
    Prompt,
    Transition,
)
from streamrl.types import (
    MAX_COUNT,
    Books,
    Completion,
    DropReason,
    FilesEndpoint,
    FinishReason,
    GeneratorStatus,
    Lease,
    LoadReport,
    SamplingParams,
    SchedulingState,
    TrajectoryGroup,
    WeightUpdate,
)
from tests.records import lease_one
from tests.waiting import until

# Nobody loses a lease to a machine that is busy elsewhere.
LEASE_TTL_S = 60.0


def make_ledger() -> Ledger:
    return Ledger(groups_per_step=2, max_staleness=1)


async def first_of(*events: asyncio.Event) -> asyncio.Event:
    """Waits for one of the events."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next(event for event in events if event.is_set())


class FakeEngine:
    """Answers with the prompt's length as token when `open` is set:
    twice when sampled, three times when greedy. One that is stopped is answered with `at_stop` of
    them."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.learner_id = ""
        self.open = asyncio.Event()
        self.open.set()
        self.failure: Exception | None = None
        self.num_failures = sys.maxsize
        self.num_running = 0
        self.most_running = 0
        self.at_stop = 0
        self.begun: list[int] = []

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.begun.append(len(prompt))
        try:
            await asyncio.sleep(0)
            handle.num_tokens = self.at_stop
            if await first_of(self.open, handle.stop) is handle.stop:
                return self._completion(prompt, self.at_stop, FinishReason.DEADLINE)
            if self.failure and self.num_failures:
                self.num_failures -= 1
                raise self.failure
            count = 2 if sampling.temperature else 3
            return self._completion(prompt, count, FinishReason.STOP)
        finally:
            self.num_running -= 1

    def _completion(self, prompt: Sequence[int], count: int, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=np.full(count, len(prompt), np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            policy_versions=np.full(count, self.policy_version, np.int32),
            finish_reason=reason,
        )

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        if update.endpoint.path == "unreadable":
            raise WeightTransferError("told to fail")
        self.policy_version, self.learner_id = update.policy_version, update.learner_id
        return LoadReport(transfer_s=0.0, pause_s=0.0)

    def gauges(self) -> dict[str, float]:
        return {"num_active": self.num_running, "num_waiting": 0, "num_tokens": 0, "pause_s": 0}

    async def close(self) -> None: ...


class Prompts:
    def __getitem__(self, prompt_index: int) -> Prompt:
        origin = f"row {prompt_index % 2} of rows.jsonl"
        return Prompt("x" * (prompt_index % 5 + 1), str(prompt_index), origin=origin)


class FakeRenderer:
    prefill = ""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (7,) * len(prompt.content)

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        return ({"role": "user", "content": prompt.content},)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def parse(self, token_ids: Sequence[int], tools: object = ()) -> Message:
        return {"role": "assistant", "content": self.decode(token_ids)}


class LengthReward:
    async def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(len(episode.response)) for episode in episodes]


class Run:
    """A generator at work on a memory buffer whose learner is the test."""

    def __init__(self, **generator: object) -> None:
        config = RunConfig.model_validate(
            {
                "model": {"path": "unused"},
                "data": {"source": "addition"},
                "generator": {"group_size": 2, "max_num_seqs": 8, "drain_s": 0.2, **generator},
                "buffer": {"max_staleness": 1},
                "learner": {"groups_per_step": 2},
                "weights": {"address": "tcp://127.0.0.1:9"},
            }
        )
        # Heartbeats come more often than a configuration allows: nothing else computes here.
        buffer = config.buffer.model_copy(update={"lease_ttl_s": 0.4})
        self.config = config.model_copy(update={"buffer": buffer})
        self.state = BufferState[TrajectoryGroup](make_ledger(), lease_ttl_s=LEASE_TTL_S)
        self.learner = MemoryBuffer(self.state)
        self.engine = FakeEngine()
        self.runner = GroupRunner(
            engine=self.engine,
            prompts=Prompts(),
            renderer=FakeRenderer(),
            make_environment=SingleTurn,
            environment="single_turn",
            reward=LengthReward(),
            sampling=SamplingParams(max_new_tokens=4),
            group_size=2,
            max_model_len=100,
        )

    def generator(self) -> Generator:
        engine, runner = self.runner.engine, self.runner
        return Generator(self.config, "g", engine, lambda _: runner, self.learner.client())

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[Generator]:
        generator = self.generator()
        running = asyncio.create_task(generator.run())
        try:
            yield generator
        finally:
            generator.stop()
            async with asyncio.timeout(120):
                await running

    async def train(self, version: int) -> None:
        """A step of the learner, at this version."""
        await self.until(lambda: self.books.buffered >= 2)
        await self.learner.take(2, version, 1.0)
        await self.learner.advance(version + 1)

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, every_s=0.005)

    @property
    def books(self):
        return self.state.ledger.books()


async def test_groups_of_the_leased_prompts_arrive_with_facts_of_every_token():
    run = Run()
    await run.learner.attach(0, None)
    async with run.generating():
        headers = (await run.learner.take(2, 0, 5.0)).headers
        groups = await run.learner.fetch([h.prompt_index for h in headers])
    assert [g.prompt_index for g in groups] == [0, 1]
    for group in groups:
        for trajectory in group.trajectories:
            num_prompt = group.prompt_index % 5 + 1
            assert trajectory.token_ids.tolist() == [7] * num_prompt + [num_prompt] * 2
            assert trajectory.response_mask.tolist() == [False] * num_prompt + [True] * 2
            assert trajectory.policy_versions.tolist() == [-1] * num_prompt + [0, 0]
            assert trajectory.reward == len(f"{num_prompt} {num_prompt}")
            assert trajectory.turns[0].num_observation_tokens == num_prompt


async def test_the_engine_is_kept_full_and_not_flooded():
    run = Run(max_num_seqs=4)
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.engine.num_running == 4)
        assert run.books.leased == 2
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 4)
    assert run.engine.most_running == 4


async def test_stopping_finishes_what_it_can_and_gives_the_rest_back():
    run = Run()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.buffered == 4)
        headers = (await run.learner.take(2, 0, 1.0)).headers
        assert headers
        run.engine.open.clear()
        await run.learner.advance(1)
        run.engine.policy_version = 1
        await run.until(lambda: run.books.leased == 2)
    assert (run.books.leased, run.books.dropped) == (0, {DropReason.RELEASED: 2})
    assert run.books.balanced
    assert (await run.learner.stats()).generators == ()


async def test_leases_live_as_long_as_the_work_on_them():
    """The time of the buffer goes on from heartbeat to heartbeat, however long they take."""
    run, now_s = Run(), 0.0
    run.learner = MemoryBuffer(run.state, clock=lambda: now_s)
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.leased == 4)
        ledger = run.state.ledger
        leases = ledger.live_leases()
        for _ in range(6):
            now_s += LEASE_TTL_S / 4
            renewed = {now_s + LEASE_TTL_S}
            await run.until(lambda to=renewed: {e.expires_at_s for e in ledger.entries} == to)
        assert ledger.live_leases() == leases
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.dropped == {}


async def test_a_buffer_that_came_back_without_memory_hears_of_the_leases_held():
    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating() as generator:
        await run.until(lambda: run.books.leased == 4)
        leases = set(run.state.ledger.live_leases())
        await run.until(lambda: bool(generator._incarnation))
        run.state.__init__(make_ledger(), lease_ttl_s=LEASE_TTL_S)
        await run.learner.attach(0, None)
        await run.until(lambda: set(run.state.ledger.live_leases()) == leases)
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 4)
    assert (run.books.granted, run.books.dropped) == (4, {})
    assert run.engine.most_running == 8


async def test_a_group_finished_before_the_buffer_told_of_its_loss_is_not_lost():
    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating() as generator:
        await run.until(lambda: run.books.leased == 4 and bool(generator._incarnation))
        run.state.__init__(make_ledger(), lease_ttl_s=LEASE_TTL_S)
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.granted == 4


async def test_groups_that_finish_at_once_are_all_kept_by_a_buffer_that_has_lost_its_memory(
    monkeypatch,
):
    """Their reports are under way together, and only the first answer is news of the loss."""
    call = MemoryBuffer._call

    async def answer_late(*arguments: object) -> object:
        answer = await call(*arguments)
        await asyncio.sleep(0.05)
        return answer

    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating() as generator:
        await run.until(lambda: run.books.leased == 4 and bool(generator._incarnation))
        monkeypatch.setattr(MemoryBuffer, "_call", answer_late)
        run.state.__init__(make_ledger(), lease_ttl_s=LEASE_TTL_S)
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 4)
    assert (run.books.granted, run.books.dropped) == (4, {})


async def test_a_failed_rollout_drops_its_group_and_the_generator_goes_on(caplog):
    run = Run()
    await run.learner.attach(0, None)
    run.engine.failure = RolloutError("no luck")
    run.engine.num_failures = 3 * 2
    async with run.generating():
        await run.until(lambda: run.books.buffered == 4)
        await run.until(lambda: any(g.last_failure for g in run.state.stats(0.0).generators))
        (status,) = run.state.stats(0.0).generators
    assert run.books.dropped[DropReason.FAILED] >= 3
    assert run.books.balanced
    assert "prompt 1 (row 1 of rows.jsonl) failed: no luck" in caplog.text
    assert "(row 0 of rows.jsonl, failed 2 times) failed: no luck" in caplog.text
    assert status.last_failure.sentence == "no luck"
    assert {failed.row for failed in status.failed_rows} == {
        "row 0 of rows.jsonl",
        "row 1 of rows.jsonl",
    }


async def assert_gives_up(run: Run, reason: str) -> None:
    await run.learner.attach(0, None)
    generator = run.generator()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(generator.run(), 120)
    sentence = f"^{reason}; 32 groups have failed one after the other$"
    assert caught.group_contains(RolloutError, match=sentence)


async def test_a_generator_whose_every_group_fails_gives_up_with_the_reason():
    run = Run()
    run.engine.failure = RolloutError("always")
    await assert_gives_up(run, "always")


async def test_groups_that_the_buffer_refuses_as_malformed_count_as_failures(monkeypatch):
    async def refused(self: MemoryBuffer, lease_id: str, group: TrajectoryGroup) -> None:
        await self.release(lease_id, DropReason.MALFORMED)
        raise CorruptMessageError("no number")

    monkeypatch.setattr(MemoryBuffer, "put", refused)
    await assert_gives_up(Run(), "no number")


async def test_a_group_that_cannot_be_encoded_ends_its_lease_and_no_other(monkeypatch):
    put = MemoryBuffer.put

    async def encoded(self: MemoryBuffer, lease_id: str, group: TrajectoryGroup) -> None:
        if group.prompt_index == 1:
            raise CorruptMessageError("list cannot be encoded: it holds no number")
        await put(self, lease_id, group)

    monkeypatch.setattr(MemoryBuffer, "put", encoded)
    run = Run()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.dropped == {DropReason.MALFORMED: 1}
    assert 1 not in run.books.open_prompt_indices


async def test_a_reward_that_cancels_itself_fails_its_group(caplog):
    class Canceled(LengthReward):
        async def score(self, episodes: Sequence[Episode]) -> list[float]:
            raise asyncio.CancelledError

    run = Run()
    run.runner = dataclasses.replace(run.runner, reward=Canceled())
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.dropped.get(DropReason.FAILED, 0) >= 2)
    assert "failed: the environment, a tool or the reward canceled itself" in caplog.text


async def test_log_probabilities_that_are_no_numbers_fail_their_group():
    class Diverged(FakeEngine):
        def _completion(self, *args: object) -> Completion:
            completion = super()._completion(*args)
            return msgspec.structs.replace(completion, logprobs=completion.logprobs * np.nan)

    run = Run()
    run.runner = dataclasses.replace(run.runner, engine=Diverged())
    await assert_gives_up(run, "what was sampled cannot be recorded: behavior_logprobs: has NaN.*")


async def test_an_engine_that_dies_takes_the_generator_with_it():
    run = Run()
    await run.learner.attach(0, None)
    run.engine.failure = RuntimeError("the engine's thread has died")
    generator = run.generator()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(generator.run(), 120)
    assert caught.group_contains(RuntimeError, match="thread has died")


async def test_a_lost_lease_ends_its_rollouts():
    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.engine.num_running == 8)
        for lease_id in run.state.ledger.live_leases():
            run.state.ledger.release(lease_id, DropReason.EXPIRED)
        run.state.ledger.finished = True
        await run.until(lambda: run.engine.num_running == 0)
    assert run.books.buffered == 0


async def test_a_group_waits_for_the_version_its_lease_asks_for():
    run = Run()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.train(0)
        await run.until(lambda: run.books.buffered == 2 and run.books.leased == 2)
        assert run.engine.num_running == 0, "version 0 would be too stale by then"
        run.engine.policy_version = 1
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.dropped == {}


async def test_a_lease_of_a_version_that_the_learner_has_left_is_given_back():
    """Its lost future will not be published again soon; waiting for it would starve everybody."""
    run = Run()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.train(0)
        await run.until(lambda: run.books.buffered == 2 and run.books.leased == 2)
        await run.learner.attach(0, Books())
        await run.until(lambda: run.books.leased == 0)
        assert run.books.dropped == {DropReason.RELEASED: 2}
        await run.train(0)
        await run.train(1)
        await run.until(lambda: run.books.leased == 4)
        run.engine.policy_version = 2
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.dropped == {DropReason.RELEASED: 2}


async def test_with_the_weights_of_another_learner_nothing_is_leased_and_nothing_begins():
    """Although the version has the same number; the running sequences go on."""
    run = Run()
    run.engine.policy_version, run.engine.learner_id = 1, "old"
    run.engine.open.clear()
    await run.learner.attach(1, None, "old")
    async with run.generating() as generator:
        await run.until(lambda: run.engine.num_running == 8)
        await run.learner.attach(1, None, "new")
        lost = run.state.ledger.live_leases()[0]
        run.state.ledger.release(lost, DropReason.EXPIRED)
        assert await run.learner.lease(["g/x"], "g", 0.0, "old") == ()
        await run.until(lambda: run.state.registry.statuses[0].is_catching_up)
        await run.until(lambda: run.engine.num_running == 6)
        assert run.books.leased == 3
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 3)
        assert run.books.granted == 4
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(1))
        assert generator._engine.learner_id == "h"
        assert run.books.granted == 4, "the buffer's learner is another one still"
        await run.learner.attach(1, None, "h")
        await run.until(lambda: run.books.buffered == 4)


async def test_a_lease_that_has_not_begun_waits_for_the_learners_weights():
    run = Run()
    await run.learner.attach(1, None, "old")
    run.engine.learner_id = "old"
    asked = MemoryBuffer.lease
    granted = await asked(run.learner, ["other/0"], "other", 0.0)
    assert granted[0].min_policy_version == 0
    async with run.generating() as generator:
        await run.until(lambda: run.state.registry.statuses != ())
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(1))
        generator._version_gate.on_learner_version(1, "new")
        async with asyncio.TaskGroup() as tasks:
            await generator._begin(granted[0], tasks)
            generator._version_gate.on_learner_version(1, "new")
            generator._on_change()
            assert not generator._groups["other/0"].has_begun
            generator._version_gate.on_learner_version(1, "h")
            generator._on_change()
            assert generator._groups["other/0"].has_begun


def update(version: int, path: str = "readable") -> WeightUpdate:
    endpoint = FilesEndpoint(path=path)
    return WeightUpdate(
        policy_version=version, learner_id="h", manifest=(), endpoint=endpoint, key=b""
    )


async def test_a_generator_that_joins_late_leases_nothing_before_it_has_caught_up():
    run = Run()
    await run.learner.attach(3, None)
    async with run.generating() as generator:
        await run.until(lambda: bool(run.state.registry))
        assert (await run.learner.stats()).generators[0].is_catching_up
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(2))
        await asyncio.sleep(0.2)
        assert run.books.granted == 0
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(3))
        await run.until(lambda: run.books.buffered == 4)
        await run.until(lambda: not run.state.registry.statuses[0].is_catching_up)


async def test_a_generator_whose_update_failed_leases_nothing_before_it_has_caught_up():
    run = Run()
    await run.learner.attach(0, None)
    async with run.generating() as generator:
        await run.until(lambda: run.books.buffered == 4)
        with pytest.raises(WeightTransferError):
            await generator._load_weights(
                WeightTarget(generator._engine.load_weights), update(1, "unreadable")
            )
        headers = (await run.learner.take(2, 0, 1.0)).headers
        assert len(headers) == 2
        await run.learner.advance(1)
        # What it had asked for before is granted now, as far as admitted, and given back.
        await run.until(lambda: run.books.granted > 4 and run.books.leased == 0)
        num_returned = run.books.granted - 4
        assert num_returned in (1, 2)
        assert run.books.dropped == {DropReason.RELEASED: num_returned}
        await run.until(lambda: run.state.registry.statuses[0].is_catching_up)
        assert (run.books.leased, run.books.granted) == (0, 4 + num_returned)
        await generator._load_weights(WeightTarget(generator._engine.load_weights), update(1))
        await run.until(lambda: run.books.buffered == 4)


async def test_one_call_leases_all_that_the_engine_has_room_for(monkeypatch):
    run, asked = Run(), []
    lease = MemoryBuffer.lease

    async def counted(buffer, lease_ids, *others):
        asked.append(len(lease_ids))
        return await lease(buffer, lease_ids, *others)

    monkeypatch.setattr(MemoryBuffer, "lease", counted)
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.leased == 4)
        assert asked == [4]
        run.engine.open.set()
        await run.train(0)
        await run.until(lambda: run.books.granted == 6)
        assert all(1 <= count <= 4 for count in asked)


class TurnsEngine(FakeEngine):
    """Knows in which turn of the event loop each of its requests came."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.asked_at: list[int] = []

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def generate(self, *arguments: object) -> Completion:
        self.asked_at.append(self.turn)
        return await super().generate(*arguments)


async def test_what_was_leased_together_begins_together_and_in_order():
    run = Run()
    run.engine = engine = TurnsEngine()
    run.runner = dataclasses.replace(run.runner, engine=engine)
    engine.open.clear()
    counting = asyncio.create_task(engine.count_turns())
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: len(engine.asked_at) == 8)
        assert len(set(engine.asked_at)) == 1, "an engine prefills them at once"
        assert engine.begun == [1, 1, 2, 2, 3, 3, 4, 4]
        engine.open.set()
    counting.cancel()


async def test_a_drained_generator_finishes_its_groups_and_leaves():
    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    generator = run.generator()
    running = asyncio.create_task(generator.run())
    await run.until(lambda: run.books.leased == 4)
    await run.learner.set_scheduling_state("g", SchedulingState.DRAINING)
    run.engine.open.set()
    await asyncio.wait_for(running, 120)
    assert (run.books.buffered, run.books.granted, run.books.dropped) == (4, 4, {})
    stats = await run.learner.stats()
    assert (stats.generators, stats.scheduling_states) == ((), {})


async def test_a_drain_that_was_undone_in_time_is_forgotten():
    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.books.leased == 4)
        await run.learner.set_scheduling_state("g", SchedulingState.DRAINING)
        await asyncio.sleep(0.2)
        await run.learner.set_scheduling_state("g", SchedulingState.ACTIVE)
        run.engine.open.set()
        await run.train(0)
        run.engine.policy_version = 1
        await run.until(lambda: run.books.granted == 6)


async def test_a_generator_whose_id_another_process_took_leaves():
    run = Run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    old = run.generator()
    running = asyncio.create_task(old.run())
    await run.until(lambda: run.books.leased == 4)
    async with run.generating():
        await asyncio.wait_for(running, 120)
        run.engine.open.set()
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.dropped == {DropReason.EXPIRED: 4}


def test_what_is_caught_up_to_is_what_a_learner_has_published():
    gate = VersionGate(publish_every=2, max_staleness=1)
    assert not gate.is_open(0, ""), "no heartbeat was answered yet"
    gate.on_learner_version(7, "a")
    assert [gate.is_open(version, "a") for version in (5, 6)] == [False, True]
    gate.on_learner_version(8, "a")
    assert [gate.is_open(version, "a") for version in (6, 7)] == [False, True]
    gate.on_learner_version(3, "a")
    assert gate.is_open(2, "a"), "the learner came back at version 3 and has published 2"
    gate.lacks_weights = True
    gate.on_learner_version(3, "a")
    assert not gate.is_open(9, "a")
    gate.on_loaded("a")
    assert gate.is_open(2, "a")


def test_the_same_version_of_another_learner_is_another_one():
    gate = VersionGate(publish_every=1, max_staleness=1)
    gate.on_learner_version(12, "")
    assert gate.is_open(12, "a"), "nobody says whose this version is"
    gate.on_learner_version(12, "b")
    assert [gate.is_open(12, learner) for learner in ("a", "b")] == [False, True]
    assert not gate.is_open(0, ""), "the model folder's is too old"
    gate.on_learner_version(0, "c")
    assert gate.is_open(0, ""), "it is version 0 of every learner"
    gate.on_loaded("d")
    assert [gate.is_open(12, learner) for learner in "cd"] == [False, True]


async def test_leases_whose_weights_do_not_come_are_given_back_and_others_take_them(monkeypatch):
    """Nothing sampled is lost: those that have begun are put, and no prompt is trained twice."""
    monkeypatch.setattr(version_gate, "SHORTEST_S", 0.0)
    run = Run()
    term = await run.learner.attach(0, None)
    async with run.generating() as cut_off:
        await run.until(lambda: run.books.buffered == 4)
        for version in (0, 1):
            await run.learner.take(2, version, 0.0)
            await run.learner.advance(version + 1)
        # Its engine has version 0, and 2 is the learner's: what is leased now needs 1 or newer.
        await run.until(lambda: run.books.dropped.get(DropReason.RELEASED, 0) >= 1)
        await run.until(lambda: not cut_off._groups)
        assert run.books.leased == 0
        assert not cut_off._is_current()
        assert run.books.balanced
        cut_off._engine.policy_version = 2
        cut_off._notify()
        await run.until(lambda: run.books.buffered == 4)
    assert run.books.dropped.keys() == {DropReason.RELEASED}
    assert (run.books.trained, term is not None) == (4, True)


def test_leases_wait_for_a_version_as_long_as_loads_take(monkeypatch):
    clock = 100.0
    monkeypatch.setattr(version_gate.time, "monotonic", lambda: clock)
    gate = VersionGate(publish_every=2, max_staleness=2)
    for learner_version in (1, 3):
        gate.on_learner_version(learner_version, "")
    starved = StarvedLeases(gate)

    def group(number: int, min_policy_version: int, *, has_begun: bool = False) -> LeasedGroup:
        lease = Lease(
            lease_id=f"g/{number}", prompt_index=number, min_policy_version=min_policy_version
        )
        made = LeasedGroup(lease, SimpleNamespace(), GroupProgress(1))
        if has_begun:
            made.turn.set()
        return made

    groups = [group(0, 2), group(1, 1, has_begun=True), group(2, 0), group(3, 3)]

    def given_back(policy_version: int, learner_id: str = "") -> list[int]:
        starved.give_back(groups, policy_version, learner_id)
        return [group.lease.prompt_index for group in groups if group.is_given_back]

    assert given_back(1) == []
    assert starved.patience_s == version_gate.SHORTEST_S
    clock += version_gate.SHORTEST_S - 0.1
    assert given_back(1) == []
    assert gate.is_open(1, "")
    clock += 0.1
    assert given_back(1) == [0], (
        "version 3 is not published yet, and what needs no newer version waits for its turn"
    )
    assert [gate.is_open(version, "") for version in (1, 2)] == [False, True]
    starved.on_loaded(LoadReport(transfer_s=3.0, pause_s=0.0, load_s=1.0))
    assert starved.patience_s == 12.0
    assert given_back(2) == [0]
    gate.on_learner_version(3, "new")
    assert given_back(2, "old") == [0]
    clock += starved.patience_s
    assert given_back(2, "old") == [0, 2], "no version of another learner is one that it waits for"


def test_an_engine_of_unknown_weights_leases_nothing_before_it_has_loaded_some():
    gate = VersionGate(publish_every=1, max_staleness=2, lacks_weights=True)
    gate.on_learner_version(0, "")
    assert not gate.is_open(0, "")
    gate.on_loaded("a")
    assert gate.is_open(0, "a")


async def test_what_has_not_begun_is_given_back_if_the_learners_weights_do_not_arrive():
    run = Run()
    run.engine.learner_id = "old"
    await run.learner.attach(1, None, "old")
    run.engine.policy_version = 1
    (lease,) = await run.learner.lease(["other/0"], "other", 0.0, "old")
    async with run.generating() as generator:
        await run.until(lambda: run.books.buffered == 3)
        generator._version_gate.on_learner_version(1, "new")
        async with asyncio.TaskGroup() as tasks:
            await generator._begin(lease, tasks)
            generator._version_gate.on_learner_version(1, "new")
            with pytest.raises(WeightTransferError):
                await generator._load_weights(
                    WeightTarget(generator._engine.load_weights), update(1, "unreadable")
                )
            assert not generator._groups["other/0"].has_begun
        assert run.state.ledger.entries.find("other/0") is None
        assert run.books.dropped.keys() == {DropReason.RELEASED}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_that_start_at_random_or_elsewhere_lack_the_weights(engine):
    def settings(**given: object) -> GeneratorSettings:
        return GeneratorSettings.model_validate({"engine": engine, engine: given})

    assert not settings().lacks_weights
    assert settings(url="http://127.0.0.1:1").lacks_weights
    dummy = settings(load_format="dummy")
    assert dummy.lacks_weights
    assert not dummy.reading_weights().lacks_weights


async def test_the_end_of_the_run_ends_the_generator():
    run = Run()
    await run.learner.attach(0, None)
    generator = run.generator()
    running = asyncio.create_task(generator.run())
    await run.until(lambda: run.books.buffered == 4)
    await run.learner.finish()
    await asyncio.wait_for(running, 120)


class CountingEnvironment:
    """Three turns; shows one token between them."""

    def __init__(self) -> None:
        self._turn = 0

    async def start(self, context: EnvironmentContext) -> Observation:
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        self._turn += 1
        again = Observation(token_ids=(9,))
        return Transition(observation=again, done=self._turn == 3, num_tool_calls=1)

    async def close(self) -> None:
        pass


async def test_the_greedy_reward_stands_with_every_sibling():
    run = Run()
    runner = dataclasses.replace(run.runner, with_greedy_reward=True)
    await run.learner.attach(0, None)
    group = await runner.run(await lease_one(run.learner, "a", "g", 0.0))
    assert len(group.trajectories) == 2
    assert [t.reward for t in group.trajectories] == [len("1 1"), len("1 1")]
    assert [t.metrics["greedy_reward"] for t in group.trajectories] == [len("1 1 1")] * 2


@pytest.mark.parametrize(
    ("difficulty", "recorded"),
    [(0.5, {"difficulty": 0.5}), (float("nan"), {}), (10**400, {}), ("hard", {}), (None, {})],
    ids=["number", "nan", "huge", "text", "none"],
)
async def test_the_difficulty_of_a_row_is_recorded_if_it_is_a_number(difficulty, recorded):
    class Rows(Prompts):
        def __getitem__(self, prompt_index: int) -> Prompt:
            prompt = super().__getitem__(prompt_index)
            return dataclasses.replace(prompt, row={"difficulty": difficulty})

    run = Run()
    runner = dataclasses.replace(run.runner, prompts=Rows())
    await run.learner.attach(0, None)
    group = await runner.run(await lease_one(run.learner, "a", "g", 0.0))
    metrics = group.trajectories[0].metrics
    assert {k: v for k, v in metrics.items() if k == "difficulty"} == recorded


async def test_turns_are_recorded_one_after_the_other():
    run = Run()
    runner = GroupRunner(
        **{
            **{f: getattr(run.runner, f) for f in run.runner.__dataclass_fields__},
            "make_environment": CountingEnvironment,
        }
    )
    await run.learner.attach(0, None)
    lease = await lease_one(run.learner, "a", "g", 0.0)
    group = await runner.run(lease)
    trajectory = group.trajectories[0]
    assert trajectory.token_ids.tolist() == [7, 1, 1, 9, 4, 4, 9, 7, 7]
    assert trajectory.response_mask.tolist() == [
        False,
        *[True] * 2,
        False,
        *[True] * 2,
        False,
        *[True] * 2,
    ]
    assert [t.num_observation_tokens for t in trajectory.turns] == [1, 1, 1]
    assert [t.num_tool_calls for t in trajectory.turns] == [1, 1, 1]


def test_what_a_server_tells_of_itself_can_be_reported_whatever_it_is():
    """With a heartbeat, without which the generator would end."""
    run = Run()
    gauge = 2.0**53
    run.engine.gauges = lambda: dict.fromkeys(
        ("num_active", "num_waiting", "num_tokens", "pause_s"), gauge
    )
    report = StatusReport(
        "g", "s", run.engine, FailureRecord(), Occupancy(run.config.generator, num_episodes=2)
    )
    status = report.make({}, is_leaving=False, is_catching_up=False)
    assert wire.decode(wire.encode(status), GeneratorStatus) == status
    assert (status.num_active, status.pause_s) == (MAX_COUNT, gauge)


def test_the_rate_of_tokens_is_that_of_a_minute():
    """A slow model computes a prompt, or waits for weights, for longer than between two reports."""
    now_s = [0.0]
    rate = TokenRate(clock=lambda: now_s[0])
    rates = []
    for second in range(1, 181):
        now_s[0] = float(second)
        # Half of each 20 s it samples nothing.
        rates.append(rate.read(10.0 * (second // 20) + min(10.0, second % 20)))
    assert min(rates) > 0
    assert rates[-1] == pytest.approx(0.5, rel=0.1)
