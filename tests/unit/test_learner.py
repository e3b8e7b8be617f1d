"""The learner's loop over batches that are lent in parts, with a trainer on the tiny model."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from learners.batch.training_batch import TrainingBatch
from learners.executor.lockstep import LearnerRank, Lockstep
from learners.learner import Learner
from learners.parallel.ranks import Ranks
from learners.session import LearnerSession, LearnerState
from learners.trainer import Trainer
from learners.validations import Validations
from streamrl.config import RunConfig
from streamrl.config.buffer import SteeredStaleness
from streamrl.errors import CheckpointWriteError, LostMemoryError, TransportError
from streamrl.types import (
    BufferStats,
    GeneratorStatus,
    GroupHeader,
    LearnerActivity,
    TakenBatch,
    TrajectoryGroup,
    ValidationReport,
    ValidatorStatus,
)
from tests.training import make_config, make_groups, make_trainer
from tests.unit.test_session import Reporter
from tests.waiting import until

GROUPS_PER_STEP = 3


class PartsBuffer(MemoryBuffer):
    """Lends what `lend` gets, as soon as it gets it, until a learner attaches or a step is made."""

    def __init__(self) -> None:
        ledger = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=2)
        super().__init__(BufferState(ledger, lease_ttl_s=60.0))
        self.lent: tuple[TrajectoryGroup, ...] = ()
        self.held: list[int | None] = []
        self.advanced: list[int] = []
        self.bounds: list[int] = []
        self.acknowledged: list[int] = []
        self.is_away = asyncio.Event()
        self.is_back = asyncio.Event()
        self._has_lost_memory = False

    async def lend(self, *groups: TrajectoryGroup) -> None:
        self.lent = (*self.lent, *groups)
        await self._notify()

    async def lose_memory(self) -> None:
        self._has_lost_memory = True
        await self._notify()

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
        num_held: int | None = None,
    ) -> TakenBatch:
        self.held.append(num_held)
        async with self._changed:
            least = num_groups if num_held is None else num_held + 1
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(
                        lambda: self._has_lost_memory or len(self.lent) >= least
                    )
            except TimeoutError:
                return TakenBatch()
        if self._has_lost_memory:
            self._has_lost_memory, self.lent = False, ()
            raise LostMemoryError("it restarted")
        headers = tuple(map(GroupHeader.of, self.lent))
        return TakenBatch(headers=headers, groups=self.lent[num_held or 0 :])

    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats:
        self.advanced.append(policy_version)
        self.bounds.append(steered_bound)
        self.lent = ()
        return await self.stats()

    async def acknowledge(self, policy_version: int) -> None:
        if self.is_away.is_set():
            await self.is_back.wait()
        self.acknowledged.append(policy_version)


class Sender:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.is_last = False

    def snapshot(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self.versions.append(policy_version)

    def handle_reports(self, on_report: Callable[[ValidationReport], None]) -> None:
        self.report = on_report

    def validators(self) -> dict[str, ValidatorStatus]:
        return {"validator": ValidatorStatus()}

    def send_last(self) -> None:
        self.is_last = True

    def publish(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        return {}


class Records:
    """What the learner keeps of its run, in memory; a full disk takes no checkpoint."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.steered: dict[int, str] = {}
        self.saved: list[int] = []
        self.num_failures = 0
        self.is_full = False
        self.is_slow = False
        self.is_begun = False
        self.validated: dict[int, dict[str, float]] = {}
        self.writing: list[Future[Path]] = []

    def begin(self) -> None:
        self._require_space()
        self.is_begun = True

    def log(
        self,
        step: int,
        prompt_indices: Sequence[int],
        metrics: Mapping[str, Any],
        steered: str = "",
    ) -> None:
        assert self.is_begun
        self.lines.append({**metrics, "step": step})
        self.steered |= {step: steered} if steered else {}

    def log_validation(self, policy_version: int, metrics: dict[str, float]) -> None:
        assert self.is_begun
        assert policy_version not in self.validated
        self.validated = {**self.validated, policy_version: metrics}

    def save(self, trainer: Trainer, state: LearnerState) -> Future[Path]:
        assert all(p.grad is None for p in trainer.policy.parameters().values())
        written: Future[Path] = Future()
        try:
            self._require_space()
        except CheckpointWriteError as error:
            written.set_exception(error)
        else:
            self.saved.append(state.policy_version)
            self.writing.append(written)
            if not self.is_slow:
                written.set_result(Path("checkpoint"))
        return written

    def _require_space(self) -> None:
        if self.is_full:
            self.num_failures += 1
            raise CheckpointWriteError("the disk is full")


class CountingReporter(Reporter):
    num_stalls = 0


class Run:
    """A learner that runs as a task, and what it works with."""

    def __init__(self, config: RunConfig) -> None:
        self.buffer, self.records, self.reporter = PartsBuffer(), Records(), CountingReporter()
        self.sender = Sender()
        self.trainer = make_trainer(config)
        session = LearnerSession(config, self.buffer, self.reporter, LearnerState())
        rank = LearnerRank(
            self.trainer,
            Ranks(),
            fetch=self.buffer.fetch,
            save=self.records.save,
            snapshot=self.sender.snapshot,
        )
        validations = Validations(config, self.sender, self.records, self.reporter)
        both = (self.sender, self.records, self.reporter, validations)
        self.learner = Learner(config, Lockstep(rank), session, *both)
        self.task = asyncio.create_task(self.learner.run())

    async def until_held(self, num_held: int | None, num_calls: int) -> None:
        """Until the learner has asked so often for a loan of more groups than these."""
        async with asyncio.timeout(120):
            while self.buffer.held.count(num_held) < num_calls:
                assert not self.task.done(), self.task
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        async with asyncio.timeout(120):
            await self.task


def configure(max_steps: int = 1, every: int = 1, **algorithm: Any) -> RunConfig:
    learner = {"groups_per_step": GROUPS_PER_STEP, "checkpoint": {"every": every}}
    buffer, run = {"max_staleness": 2}, {"max_steps": max_steps}
    # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
    optimizer = {"eps": 1e-5}
    return make_config(
        learner=learner, buffer=buffer, run=run, algorithm=algorithm, optimizer=optimizer
    )


def assert_trained(trainer: Trainer, *batches: Sequence[TrajectoryGroup]) -> None:
    """That the parameters are those after one step over each batch."""
    plain = make_trainer(configure())
    for version, groups in enumerate(batches):
        plain.step(TrainingBatch.of(groups, version))
    expected = plain.policy.parameters()
    for name, parameter in trainer.policy.parameters().items():
        assert torch.allclose(parameter, expected[name], rtol=0, atol=5e-6), name


async def test_a_part_is_trained_while_the_rest_of_the_batch_is_sampled():
    first, second = make_groups(0, 3), make_groups(1, 3)
    run = Run(configure(max_steps=2))
    await run.buffer.lend(first[0])
    await run.until_held(1, num_calls=1)
    assert any(p.grad is not None for p in run.trainer.policy.parameters().values())
    assert run.buffer.advanced == run.records.saved == []
    await run.buffer.lend(*first[1:])
    await run.until_held(0, num_calls=2)
    await run.buffer.lend(*second)
    await run.end()
    assert_trained(run.trainer, first, second)
    assert [line["learner/num_parts"] for line in run.records.lines] == [2, 1]
    assert (run.buffer.advanced, run.records.saved) == ([1, 2], [1, 2])
    assert run.buffer.held == [0, 1, 0]


async def test_the_line_of_a_step_does_not_grow_with_many_generators():
    run = Run(configure(max_steps=2))
    for version, num_generators in enumerate((64, 1024)):
        for name in (f"g{i}" for i in range(num_generators)):
            status = GeneratorStatus(generator_id=name, session=name, policy_version=0)
            await run.buffer.heartbeat(status)
        await run.buffer.lend(*make_groups(version, 3))
        while not run.task.done() and len(run.buffer.advanced) <= version:
            await asyncio.sleep(0.005)
    await run.end()
    counts = [line["generator/count"] for line in run.records.lines]
    named = [sum(n.endswith("/heartbeat_age_s") for n in line) for line in run.records.lines]
    assert (counts, named) == ([64, 1024], [64, 0])


async def test_a_version_that_generators_may_wait_for_is_published_early(monkeypatch):
    monkeypatch.setattr("learners.session.TAKE_WAIT_S", 0.02)
    config = configure(max_steps=2)
    weights = config.weights.model_copy(update={"publish_every": 3})
    run = Run(config.model_copy(update={"weights": weights}))
    await run.buffer.lend(*make_groups(0, 3))
    async with asyncio.timeout(120):
        while run.sender.versions != [0, 1]:
            await asyncio.sleep(0.005)
    await run.until_held(0, num_calls=6)
    assert run.sender.versions == [0, 1]
    await run.buffer.lend(*make_groups(1, 3))
    await run.end()
    assert run.sender.versions == [0, 1]


async def test_a_steered_bound_is_told_with_the_step_and_published_for(monkeypatch, caplog):
    """Under a bound of 0 each version is published. The learner waits, and there is no lag."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("learners.steering.NUM_STEPS", 2)
    monkeypatch.setattr("learners.steering.MIN_WAIT_FRAC", 0.0)
    # Of these made-up groups it is far below 1; this is 1 at each step.
    monkeypatch.setattr("learners.learner.EFF_SAMPLE_SIZE", "learner/num_parts")
    config = configure(max_steps=6)
    weights = config.weights.model_copy(update={"publish_every": 3})
    limits = SteeredStaleness(min=0, max=2, ess=0.5)
    buffer = config.buffer.model_copy(update={"max_staleness": limits})
    run = Run(config.model_copy(update={"weights": weights, "buffer": buffer}))
    run.buffer._state = BufferState(
        Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=2, min_staleness=0), lease_ttl_s=60.0
    )
    for version in range(6):
        await run.buffer.lend(*make_groups(version, 3))
        while not run.task.done() and len(run.buffer.advanced) <= version:
            await asyncio.sleep(0.005)
    await run.end()
    assert run.buffer.bounds == [0, 0, 1, 1, 1, 2]
    assert run.sender.versions == [0, 1, 2, 3, 5, 6]
    assert list(run.records.steered) == [3, 6]
    assert run.records.steered[3].startswith("from 0 to 1: the effective sample size")
    assert "step 3: buffer.max_staleness steered from 0 to 1: " in caplog.text


async def test_a_learner_that_goes_on_has_the_signs_of_the_steps_before(tmp_path, caplog):
    config = configure()
    signs = config.run.signs.model_copy(update={"steps": 5})
    run_settings = config.run.model_copy(update={"folder": tmp_path, "signs": signs})
    config = config.model_copy(update={"run": run_settings})
    config.run.path.mkdir()
    with (config.run.path / "metrics.jsonl").open("w") as file:
        for step in range(-8, 1):
            print(json.dumps({"step": step, "reward/mean": 1e6 * (step < -3)}), file=file)
    run = Run(config)
    await run.buffer.lend(*make_groups(0, 3))
    await run.end()
    assert "and was 1000000.000 at step -4: " in run.reporter.fields["signs"][0]
    assert "steps the training reward is" in caplog.text


async def test_a_learner_that_stops_in_a_part_discards_its_gradient(caplog):
    run = Run(configure())
    await run.buffer.lend(*make_groups(0, 2))
    await run.until_held(2, num_calls=1)
    run.learner.stop()
    await run.end()
    assert "discarded the gradient of 2 groups of step 1" in caplog.text
    assert (run.buffer.advanced, run.records.saved) == ([], [])
    assert all(p.grad is None for p in run.trainer.policy.parameters().values())
    assert_trained(run.trainer)


async def test_a_batch_begins_again_when_the_buffer_lost_its_memory(caplog):
    lost, lent = make_groups(0, 2), make_groups(1, 3)
    run = Run(configure())
    await run.buffer.lend(*lost)
    await run.until_held(2, num_calls=1)
    await run.buffer.lose_memory()
    await run.until_held(0, num_calls=2)
    await run.buffer.lend(lent[0])
    await run.until_held(1, num_calls=1)
    await run.buffer.lend(*lent[1:])
    await run.end()
    assert "discarded the gradient of 2 groups of step 1" in caplog.text
    assert_trained(run.trainer, lent)
    assert run.records.lines[0]["learner/num_parts"] == 2
    assert run.reporter.activities.count(LearnerActivity.ATTACHING) == 2


async def test_a_batch_begins_again_when_its_loan_has_other_groups():
    groups = make_groups(0, 3)
    run = Run(configure())
    await run.buffer.lend(groups[0])
    await run.until_held(1, num_calls=1)
    run.buffer.lent = ()
    await run.buffer.lend(groups[1], groups[0], groups[2])
    await run.end()
    assert_trained(run.trainer, groups)
    assert run.buffer.held == [0, 1, 0]
    assert run.records.lines[0]["learner/num_parts"] == 1


async def test_an_algorithm_that_compares_groups_takes_whole_batches():
    run = Run(configure(advantage_config={"whiten": True}))
    await run.buffer.lend(*make_groups(0, 3))
    await run.end()
    assert run.buffer.held == [None]


async def test_the_time_of_a_part_is_not_counted_as_waiting(monkeypatch):
    now_s = 0.0

    def costing(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return work(*arguments, **named)

        return timed

    clock = SimpleNamespace(perf_counter=lambda: now_s, time=lambda: now_s, monotonic=lambda: now_s)
    monkeypatch.setattr("learners.learner.time", clock)
    run = Run(configure())
    monkeypatch.setattr(run.buffer, "take", costing(1.0, run.buffer.take))
    monkeypatch.setattr(run.trainer, "accumulate", costing(100.0, run.trainer.accumulate))
    await run.buffer.lend(make_groups(0, 3)[0])
    await run.until_held(1, num_calls=1)
    await run.buffer.lend(*make_groups(0, 3)[1:])
    await run.end()
    assert (run.records.lines[0]["learner/wait_s"], run.records.lines[0]["learner/num_parts"]) == (
        2.0,
        2,
    )


async def test_a_step_goes_on_while_no_checkpoint_can_be_written(monkeypatch, caplog):
    monkeypatch.setattr("learners.session.TAKE_WAIT_S", 0.02)
    run = Run(configure(max_steps=8, every=2))
    await until(lambda: run.records.is_begun)
    run.records.is_full = True
    for seed in range(3):
        await run.buffer.lend(*make_groups(seed, 3))
        await until(lambda count=seed + 1: len(run.records.lines) == count)
    assert (run.buffer.acknowledged, run.records.num_failures) == ([], 1)
    sentence = "the disk is full; the steps since 0 are in no checkpoint"
    assert run.reporter.fields["unsaved"] == sentence
    assert sentence in caplog.text
    assert [line["learner/num_unsaved_steps"] for line in run.records.lines] == [1, 2, 3]
    run.records.is_full = False
    await run.buffer.lend(*make_groups(3, 3))
    await until(lambda: run.buffer.acknowledged == [4])
    assert run.reporter.fields["unsaved"] == ""
    run.learner.stop()
    await run.end()
    assert (run.records.saved, run.buffer.acknowledged) == ([4], [4, 4])


async def test_steps_go_on_while_a_checkpoint_is_written_and_one_is_written_at_a_time(monkeypatch):
    monkeypatch.setattr("learners.session.TAKE_WAIT_S", 0.02)
    run = Run(configure(max_steps=20, every=2))
    run.records.is_slow = True
    for seed in range(5):
        await run.buffer.lend(*make_groups(seed, 3))
        await until(lambda count=seed + 1: len(run.records.lines) == count)
    # The save that was due at step 4 waits for that of step 2, and nothing is acknowledged.
    assert (run.records.saved, run.buffer.acknowledged) == ([2], [])
    run.records.writing[0].set_result(Path("checkpoint"))
    # While it waits for groups, the buffer is notified; the next save begins after the next step.
    await until(lambda: run.buffer.acknowledged == [2])
    assert run.records.saved == [2]
    await run.buffer.lend(*make_groups(5, 3))
    await until(lambda: run.records.saved == [2, 6])
    # Too many steps without a checkpoint: the learner waits for the one under way.
    for seed in range(6, 8):
        await run.buffer.lend(*make_groups(seed, 3))
        await until(lambda count=seed + 1: len(run.records.lines) == count)
    await run.buffer.lend(*make_groups(8, 3))
    await until(lambda: run.reporter.activities[-1] is LearnerActivity.SAVING)
    assert len(run.records.lines) == 8
    run.records.writing[1].set_exception(CheckpointWriteError("the disk is full"))
    await until(lambda: "the disk is full" in run.reporter.fields["unsaved"])
    # At the end it waits for what is written, whatever else it was told.
    run.learner.stop()
    await until(lambda: len(run.records.writing) == 3)
    assert not run.task.done()
    run.records.writing[2].set_result(Path("checkpoint"))
    await run.end()
    assert (run.records.saved, run.buffer.acknowledged) == ([2, 6, 8], [2, 8])


async def test_a_learner_with_too_many_unsaved_steps_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr("learners.session.TAKE_WAIT_S", 0.02)
    monkeypatch.setattr("learners.checkpoints.schedule.RETRY_S", 0.02)
    run = Run(configure(max_steps=8, every=1))
    await until(lambda: run.records.is_begun)
    run.records.is_full = True
    for seed in range(3):
        await run.buffer.lend(*make_groups(seed, 3))
        await until(lambda count=seed + 1: len(run.records.lines) == count)
    await run.buffer.lend(*make_groups(3, 3))
    await until(lambda: run.records.num_failures >= 6)
    assert run.buffer.advanced == [1, 2, 3]
    assert run.reporter.fields["unsaved"].endswith("and the learner waits")
    run.records.is_full = False
    await until(lambda: run.buffer.acknowledged == [3, 4])
    run.learner.stop()
    await run.end()


async def test_the_last_checkpoint_is_waited_for_until_the_learner_is_stopped(monkeypatch):
    monkeypatch.setattr("learners.checkpoints.schedule.RETRY_S", 0.02)
    run = Run(configure())
    await until(lambda: run.records.is_begun)
    run.records.is_full = True
    await run.buffer.lend(*make_groups(0, 3))
    await until(lambda: run.records.num_failures >= 3)
    assert not run.task.done()
    run.learner.stop()
    with pytest.raises(
        CheckpointWriteError, match="stopped at step 1: the disk is full; the steps"
    ):
        await run.end()
    assert (run.records.saved, run.buffer.acknowledged) == ([], [])
    assert not (await run.buffer.stats()).finished


async def end_while_the_buffer_is_away(monkeypatch) -> Run:
    monkeypatch.setattr("learners.session.GOODBYE_S", 0.05)
    run = Run(configure(every=5))
    run.buffer.is_away.set()
    await run.buffer.lend(*make_groups(0, 3))
    await until(lambda: run.records.saved == [1])
    await asyncio.wait({run.task}, timeout=0.2)
    assert not run.task.done()
    return run


async def test_the_end_of_a_run_is_told_to_a_buffer_that_comes_back(monkeypatch):
    run = await end_while_the_buffer_is_away(monkeypatch)
    run.buffer.is_back.set()
    await run.end()
    assert run.buffer.acknowledged == [1]
    assert (await run.buffer.stats()).finished


async def test_a_signal_ends_a_learner_whose_buffer_is_away(monkeypatch):
    run = await end_while_the_buffer_is_away(monkeypatch)
    run.learner.stop()
    with pytest.raises(
        TransportError, match="does not answer; stopped at step 1 of 1, which is saved"
    ):
        await run.end()
    assert not (await run.buffer.stats()).finished


async def test_the_end_of_a_run_that_no_buffer_hears_is_an_error(monkeypatch):
    async def unreachable(self: PartsBuffer, policy_version: int) -> None:
        raise TransportError("nobody answers")

    monkeypatch.setattr(PartsBuffer, "acknowledge", unreachable)
    run = Run(configure(every=5))
    await run.buffer.lend(*make_groups(0, 3))
    with pytest.raises(TransportError, match="nobody answers"):
        await run.end()


async def test_a_learner_that_starts_on_a_full_disk_waits_before_its_first_step(monkeypatch):
    monkeypatch.setattr("learners.checkpoints.schedule.RETRY_S", 0.02)
    run = Run(configure())
    run.records.is_full = True
    await until(lambda: run.records.num_failures >= 3)
    assert run.reporter.fields["unsaved"] == "the disk is full"
    run.records.is_full = False
    await run.buffer.lend(*make_groups(0, 3))
    await run.end()
    assert (run.records.saved, run.reporter.fields["unsaved"]) == ([1], "")
