"""What is sampled outlasts its generator: the next one goes on with it."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from actors import generator
from actors.episode_record import Rollout, Segment, Span
from actors.generator import Generator
from streamrl import wire
from streamrl.config.generator import EpisodeSettings, OversampleSettings
from streamrl.errors import BufferFullError
from streamrl.interfaces import CompletionHandle, EnvironmentContext
from streamrl.types import (
    Completion,
    DropReason,
    FinishReason,
    Media,
    SamplingParams,
    SiblingHeader,
    TokenSets,
    TrajectoryGroup,
    Turn,
    replace,
)
from tests.records import lease_one, make_sibling
from tests.unit.test_generator import (
    LEASE_TTL_S,
    CountingEnvironment,
    FakeEngine,
    FakeRenderer,
    Run,
    make_ledger,
)

DEAD, ALIVE = 11, 22


class UnevenEngine(FakeEngine):
    """Of each prompt the first completions end at once, the others when `open` is set; `mark` is
    their only token."""

    def __init__(self, mark: int, num_at_once: int, *, is_open: bool = False) -> None:
        super().__init__()
        self._mark, self._num_at_once = mark, num_at_once
        if not is_open:
            self.open.clear()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        if self.begun.count(len(prompt)) >= self._num_at_once:
            return await super().generate(prompt, sampling, handle)
        self.begun.append(len(prompt))
        return self._completion(prompt, 2, FinishReason.STOP)

    def _completion(self, prompt: Sequence[int], count: int, reason: FinishReason) -> Completion:
        known = super()._completion(prompt, count, reason)
        return replace(known, token_ids=np.full(count, self._mark, np.int32))


@pytest.fixture(autouse=True)
def kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "KEEP_EVERY_S", 0.02)
    monkeypatch.setattr(generator, "ASK_S", 0.02)


def make_run() -> Run:
    return Run(group_size=3, max_num_seqs=12)


def generator_of(run: Run, engine: FakeEngine, **changes: object) -> Generator:
    runner = dataclasses.replace(run.runner, **{"group_size": 3, "engine": engine, **changes})
    return Generator(run.config, "g", engine, lambda _: runner, run.learner.client())


def num_kept(run: Run) -> list[int]:
    entries = map(run.state.ledger.entries.get, range(run.books.next_prompt_index))
    return [len(entry.siblings) for entry in entries if entry]


async def leave_siblings(run: Run, num_finished: int, **changes: object) -> None:
    """Of four groups; their generator disappears without a word."""
    await run.learner.attach(0, None)
    dead = generator_of(run, UnevenEngine(DEAD, num_finished), **changes)
    running = asyncio.create_task(dead.run())
    await run.until(lambda: num_kept(run) == [num_finished] * 4)
    running.cancel()
    await asyncio.wait([running])


async def groups_of(run: Run, engine: FakeEngine, **changes: object) -> list[TrajectoryGroup]:
    """Those that a generator puts for these prompts, which then leaves."""
    alive = generator_of(run, engine, **changes)
    running = asyncio.create_task(alive.run())
    await run.until(lambda: run.books.buffered == 4)
    alive.stop()
    await running
    return list(await run.learner.fetch(range(4)))


def marks(group: TrajectoryGroup) -> Counter[int]:
    return Counter(int(trajectory.token_ids[-1]) for trajectory in group.trajectories)


async def test_a_generator_that_dies_leaves_its_finished_siblings_to_the_next():
    run = make_run()
    await leave_siblings(run, 2)
    engine = UnevenEngine(ALIVE, 0, is_open=True)
    groups = await groups_of(run, engine)
    assert [marks(group) for group in groups] == [{DEAD: 2, ALIVE: 1}] * 4
    assert len(engine.begun) == 4
    stats = run.state.stats(0.0)
    assert (stats.books.granted, stats.books.dropped) == (8, {DropReason.EXPIRED: 4})
    assert (stats.lengths.sampled.num_responses, stats.lengths.sampled.num_tokens) == (12, 24)
    assert stats.books.balanced


async def test_one_that_leaves_with_unfinished_groups_leaves_all_that_is_finished(monkeypatch):
    monkeypatch.setattr(generator, "KEEP_EVERY_S", 3600.0)
    run = make_run()
    await run.learner.attach(0, None)
    leaving = generator_of(run, UnevenEngine(DEAD, 1))
    running = asyncio.create_task(leaving.run())
    await run.until(lambda: leaving._engine.num_running == 8)
    leaving.stop()
    await running
    assert run.state.ledger.live_leases() == ()
    engine = UnevenEngine(ALIVE, 0, is_open=True)
    assert [marks(group) for group in await groups_of(run, engine)] == [{DEAD: 1, ALIVE: 2}] * 4


async def test_groups_that_finish_at_once_keep_nothing():
    run = make_run()
    puts = []
    run.state.on_sibling = puts.append
    await run.learner.attach(0, None)
    await groups_of(run, UnevenEngine(ALIVE, 0, is_open=True))
    assert puts == []


async def test_a_sibling_that_was_left_is_the_first_to_finish():
    run = make_run()
    oversample = OversampleSettings(num_siblings=2, keep="first_finished")
    await leave_siblings(run, 2, oversample=oversample)
    engine = UnevenEngine(ALIVE, 1)
    engine.at_stop = 0
    groups = await groups_of(run, engine, oversample=oversample)
    assert [marks(group) for group in groups] == [{DEAD: 2, ALIVE: 1}] * 4
    assert [len(group.discarded_lengths) for group in groups] == [2] * 4


async def test_a_sibling_that_cannot_be_read_is_sampled_again(caplog):
    run = make_run()
    await run.learner.attach(0, None)
    lease = await lease_one(run.learner, "dead/1", "dead", 0.0)
    sibling = make_sibling(lease.lease_id, num_tokens=2)
    await run.learner.put_sibling(sibling, b"junk")
    run.state.ledger.end_lease("dead/1", DropReason.EXPIRED)
    groups = await groups_of(run, UnevenEngine(ALIVE, 0, is_open=True))
    assert [marks(group) for group in groups] == [{ALIVE: 3}] * 4
    assert "sibling 0 of prompt 0: not a StreamRL message" in caplog.text


@pytest.mark.parametrize("argument", [2**64, "\ud83d", 1j])
async def test_a_sibling_that_no_message_can_hold_costs_its_group_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, argument: object
):
    """The policy may write any argument into the call of a tool."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": argument}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    monkeypatch.setattr(FakeRenderer, "parse", lambda *_: message)
    run = make_run()
    await run.learner.attach(0, None)
    engine = UnevenEngine(ALIVE, 2)
    alive = generator_of(run, engine)
    running = asyncio.create_task(alive.run())
    await run.until(lambda: caplog.text.count("a sibling is not kept: Rollout cannot be") == 8)
    engine.open.set()
    await run.until(lambda: run.books.buffered == 4)
    alive.stop()
    await running


async def test_a_buffer_that_has_lost_the_siblings_gets_them_again():
    run = make_run()
    await run.learner.attach(0, None)
    held = generator_of(run, UnevenEngine(DEAD, 1))
    running = asyncio.create_task(held.run())
    await run.until(lambda: num_kept(run) == [1] * 4)
    run.state.__init__(make_ledger(), lease_ttl_s=LEASE_TTL_S)
    await run.learner.attach(0, None)
    # It may have leased others before it was told of the loss.
    await run.until(lambda: sum(num_kept(run)) >= 2)
    running.cancel()
    await asyncio.wait([running])


async def test_a_full_buffer_is_asked_again_and_the_group_goes_on(monkeypatch: pytest.MonkeyPatch):
    run = make_run()
    await run.learner.attach(0, None)
    asked: list[int] = []

    async def full(_: object, sibling: SiblingHeader, payload: bytes) -> None:
        asked.append(sibling.number)
        raise BufferFullError("no memory")

    monkeypatch.setattr(type(run.learner), "put_sibling", full)
    engine = UnevenEngine(ALIVE, 2)
    alive = generator_of(run, engine)
    running = asyncio.create_task(alive.run())
    await run.until(lambda: len(asked) > 3 * 4 * 2)
    engine.open.set()
    await run.until(lambda: run.books.buffered == 4)
    alive.stop()
    await running


def test_a_rollout_passes_the_wire_as_it_is():
    ids, version = np.array([5, 6], np.int32), np.array([3, 4], np.int32)
    candidates = TokenSets(np.array([2, 1], np.int32), np.array([5, 7, 6], np.int32))
    sampled = Span(ids, np.array([-1.0, -2.0], np.float32), version, False, candidates)
    read = Span(ids, np.zeros(2, np.float32), np.full(2, -1, np.int32))
    turn = Turn(num_observation_tokens=2, num_completion_tokens=2, finish_reason=FinishReason.STOP)
    media = Media.image(b"bytes")
    rollout = Rollout(
        (Segment((read, sampled), (turn,), (media,)), Segment((sampled,), (turn,))),
        {"num_turns": 2.0},
        FinishReason.MAX_TURNS,
        (5, 6),
        ({"role": "user", "content": [{"type": "text", "text": "2+2"}]},),
    )
    read_again = wire.decode(wire.encode(rollout), Rollout)
    assert repr(read_again) == repr(rollout)
    assert (read_again.oldest_version, read_again.num_sampled_tokens) == (3, 4)


class HaltingEngine(FakeEngine):
    """Samples half of each completion at once and tells of it when it is asked; the other half when
    `open` is set. `mark` are its tokens."""

    def __init__(self, mark: int, version: int = 0, *, is_open: bool = False) -> None:
        super().__init__()
        self._mark, self.policy_version, self.num_waiting = mark, version, 0
        if not is_open:
            self.open.clear()
        self.read: list[tuple[int, ...]] = []

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        self.read.append(tuple(prompt))
        self.num_waiting += 1
        half = sampling.max_new_tokens // 2
        while not self.open.is_set():
            if handle.is_asked:
                handle.sampled = self._part(half, FinishReason.ABORT)
                handle.is_asked = False
            await asyncio.sleep(0.005)
        return self._part(sampling.max_new_tokens, FinishReason.LENGTH)

    def _part(self, count: int, reason: FinishReason) -> Completion:
        known = self._completion((), count, reason)
        return replace(known, token_ids=np.full(count, self._mark, np.int32))


async def leave_unfinished(
    run: Run, engine: FakeEngine, num_unfinished: int = 3, **changes: object
) -> None:
    """So many of each of four groups; their generator disappears without a word."""
    await run.learner.attach(0, None)
    running = asyncio.create_task(generator_of(run, engine, **changes).run())
    await run.until(lambda: engine.num_waiting == 12 and num_kept(run) == [num_unfinished] * 4)
    running.cancel()
    await asyncio.wait([running])


async def test_an_unfinished_completion_is_gone_on_with():
    run = make_run()
    await leave_unfinished(run, HaltingEngine(DEAD))
    held = run.state.stats(0.0).num_bytes
    engine = HaltingEngine(ALIVE, is_open=True)
    for group in await groups_of(run, engine):
        for trajectory in group.trajectories:
            assert trajectory.token_ids[-4:].tolist() == [DEAD, DEAD, ALIVE, ALIVE]
            assert trajectory.response_mask.sum() == 4
            assert trajectory.finish_reason is FinishReason.LENGTH
            assert len(trajectory.turns) == 1
    assert all(tokens[-2:] == (DEAD, DEAD) for tokens in engine.read)
    stats = run.state.stats(0.0)
    assert (stats.lengths.sampled.num_responses, stats.lengths.sampled.num_tokens) == (12, 48)
    assert stats.books.balanced
    assert held > 0


async def test_an_unfinished_sibling_that_is_canceled_is_counted_once():
    run = make_run()
    oversample = OversampleSettings(num_siblings=2, keep="first_finished")
    await run.learner.attach(0, None)
    engine = HaltingEngine(DEAD)
    running = asyncio.create_task(generator_of(run, engine, oversample=oversample).run())
    await run.until(lambda: run.books.leased > 0 and set(num_kept(run)) == {5})
    running.cancel()
    await asyncio.wait([running])
    alive = generator_of(run, HaltingEngine(ALIVE, is_open=True), oversample=oversample)
    running = asyncio.create_task(alive.run())
    await run.until(lambda: run.books.buffered >= 2)
    alive.stop()
    await running
    (group,) = await run.learner.fetch([0])
    assert len(group.trajectories) == 3
    assert all(length in {2, 4} for length in group.discarded_lengths)
    assert len(group.discarded_lengths) == 2


async def test_the_oldest_token_of_an_unfinished_sibling_counts():
    run = make_run()
    await leave_unfinished(run, HaltingEngine(DEAD))
    entry = run.state.ledger.entries.get(0)
    assert entry is not None
    assert [(s.oldest_version, s.num_tokens) for s in entry.siblings] == [(0, 2)] * 3


class Counting(CountingEnvironment):
    """Says which instance was restored where; `fails` or `hangs` in one of its methods."""

    fails = hangs = ""
    restored: list[int] = []  # noqa: RUF012

    async def snapshot(self) -> object:
        if self.hangs == "snapshot":
            await asyncio.Event().wait()
        if self.fails == "snapshot":
            raise ValueError("told to fail")
        return object() if self.fails == "encoding" else {"turn": self._turn}

    async def restore(self, context: EnvironmentContext, snapshot: dict[str, int]) -> None:
        if self.hangs == "restore":
            await asyncio.Event().wait()
        if self.fails == "restore":
            raise ValueError("told to fail")
        self._turn = snapshot["turn"]
        self.restored.append(self._turn)


class TurnByTurnEngine(FakeEngine):
    """Answers with `mark` as many requests of each sibling as `num_turns` have been finished."""

    def __init__(self, mark: int, num_turns: int) -> None:
        super().__init__()
        self._mark, self._num_turns, self.num_waiting = mark, num_turns, 0
        self.read: list[tuple[int, ...]] = []

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        self.read.append(tuple(prompt))
        if handle.stop.is_set():
            return self._completion((), 0, FinishReason.DEADLINE)
        if prompt.count(9) >= self._num_turns:
            self.num_waiting += 1
            await asyncio.Event().wait()
        known = self._completion((), 2, FinishReason.STOP)
        return replace(known, token_ids=np.full(2, self._mark, np.int32))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setattr(Counting, "restored", [])
    return type("Own", (Counting,), {})


async def test_the_finished_turns_of_an_episode_are_kept(counting: type[Counting]):
    run = make_run()
    await leave_unfinished(run, TurnByTurnEngine(DEAD, 2), make_environment=counting)
    engine = TurnByTurnEngine(ALIVE, 3)
    for group in await groups_of(run, engine, make_environment=counting):
        for trajectory in group.trajectories:
            sampled = trajectory.token_ids[trajectory.response_mask]
            assert sampled.tolist() == [DEAD] * 4 + [ALIVE] * 2
            assert [turn.num_tool_calls for turn in trajectory.turns] == [1, 1, 1]
            assert trajectory.metrics["num_turns"] == 3.0
    assert counting.restored == [2] * 12
    assert len(engine.read) == 12
    stats = run.state.stats(0.0)
    assert (stats.lengths.sampled.num_responses, stats.lengths.sampled.num_tokens) == (12, 72)


@pytest.mark.parametrize("fails", ["snapshot", "encoding", "restore"])
async def test_a_snapshot_that_fails_costs_the_turns_and_is_said_once(
    counting: type[Counting], fails: str, caplog: pytest.LogCaptureFixture
):
    run = make_run()
    counting.fails = fails
    num_unfinished = 3 if fails == "restore" else 0
    await leave_unfinished(
        run, TurnByTurnEngine(DEAD, 2), num_unfinished, make_environment=counting
    )
    engine = TurnByTurnEngine(ALIVE, 3)
    for group in await groups_of(run, engine, make_environment=counting):
        assert marks(group) == {ALIVE: 3}
        assert [t.response_mask.sum() for t in group.trajectories] == [6] * 3
    assert counting.restored == []
    consequence = "begins anew" if fails == "restore" else "finished turns of an episode are not"
    assert caplog.text.count(consequence) == 1


@pytest.mark.parametrize("hangs", ["snapshot", "restore"])
async def test_a_snapshot_that_hangs_cuts_no_turn(
    counting: type[Counting], hangs: str, caplog: pytest.LogCaptureFixture
):
    run = make_run()
    await leave_unfinished(run, TurnByTurnEngine(DEAD, 1), make_environment=counting)
    counting.hangs, settings = hangs, EpisodeSettings(turn_deadline_s=1.0)
    engine = TurnByTurnEngine(ALIVE, 3)
    for group in await groups_of(run, engine, make_environment=counting, settings=settings):
        assert [t.response_mask.sum() for t in group.trajectories] == [6] * 3
    consequence = "begins anew" if hangs == "restore" else "finished turns of an episode are not"
    assert caplog.text.count(consequence) == 1


async def test_an_environment_that_makes_no_snapshot_begins_anew():
    run = make_run()
    engine = TurnByTurnEngine(DEAD, 2)
    await leave_unfinished(run, engine, 0, make_environment=CountingEnvironment)
    engine = TurnByTurnEngine(ALIVE, 3)
    groups = await groups_of(run, engine, make_environment=CountingEnvironment)
    assert [marks(group) for group in groups] == [{ALIVE: 3}] * 4
    assert len(engine.read) == 3 * 12
