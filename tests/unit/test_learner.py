"""The learner's loop over batches that are lent in parts, with a trainer on the tiny model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from learners import checkpoint
from learners.batch import TrainingBatch
from learners.learner import Learner
from learners.session import LearnerSession, LearnerState
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import LostMemoryError
from streamrl.types import BufferStats, GroupHeader, LearnerActivity, Loan, TrajectoryGroup
from tests.training import make_config, make_groups, make_trainer
from tests.unit.test_session import Reporter

GROUPS_PER_STEP = 3


class PartsBuffer(MemoryBuffer):
    """Lends what `lend` gets, as soon as it gets it, until a learner attaches or a step is made."""

    def __init__(self) -> None:
        ledger = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=2)
        super().__init__(BufferState(ledger, lease_ttl_s=60.0))
        self.lent: tuple[TrajectoryGroup, ...] = ()
        self.held: list[int | None] = []
        self.advanced: list[int] = []
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
    ) -> Loan:
        self.held.append(num_held)
        async with self._changed:
            least = num_groups if num_held is None else num_held + 1
            await self._changed.wait_for(lambda: self._has_lost_memory or len(self.lent) >= least)
        if self._has_lost_memory:
            self._has_lost_memory, self.lent = False, ()
            raise LostMemoryError("it restarted")
        headers = tuple(map(GroupHeader.of, self.lent))
        return Loan(headers=headers, groups=self.lent[num_held or 0 :])

    async def advance(self, policy_version: int) -> BufferStats:
        self.advanced.append(policy_version)
        self.lent = ()
        return await self.stats()

    async def acknowledge(self, policy_version: int) -> None:
        pass


class Sender:
    def snapshot(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        pass

    def publish(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        return {}


class Lines(list[dict[str, Any]]):
    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.append({**metrics, "step": step})


class CountingReporter(Reporter):
    num_stalls = 0


class Run:
    """A learner that runs as a task, and what it works with."""

    def __init__(self, config: RunConfig) -> None:
        self.buffer, self.lines, self.reporter = PartsBuffer(), Lines(), CountingReporter()
        self.trainer = make_trainer(config)
        session = LearnerSession(config, self.buffer, self.reporter, LearnerState())
        self.learner = Learner(
            config, self.trainer, session, Sender(), self.lines, Lines(), self.reporter
        )
        self.task = asyncio.create_task(self.learner.run())

    async def until_held(self, num_held: int | None, num_calls: int) -> None:
        """Until the learner has asked so often for a loan of more groups than these."""
        async with asyncio.timeout(20):
            while self.buffer.held.count(num_held) < num_calls:
                assert not self.task.done(), self.task
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        async with asyncio.timeout(20):
            await self.task


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that were saved; nothing is on disk."""
    versions: list[int] = []

    def save(config: RunConfig, trainer: Trainer, state: LearnerState) -> str:
        assert all(p.grad is None for p in trainer.policy.parameters().values())
        versions.append(state.policy_version)
        return "checkpoint"

    monkeypatch.setattr(checkpoint, "save", save)
    return versions


def configure(max_steps: int = 1, **algorithm: Any) -> RunConfig:
    learner = {"groups_per_step": GROUPS_PER_STEP, "checkpoint": {"every": 1}}
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


async def test_a_part_is_trained_while_the_rest_of_the_batch_is_sampled(saved):
    first, second = make_groups(0, 3), make_groups(1, 3)
    run = Run(configure(max_steps=2))
    await run.buffer.lend(first[0])
    await run.until_held(1, num_calls=1)
    assert any(p.grad is not None for p in run.trainer.policy.parameters().values())
    assert run.buffer.advanced == saved == []
    await run.buffer.lend(*first[1:])
    await run.until_held(0, num_calls=2)
    await run.buffer.lend(*second)
    await run.end()
    assert_trained(run.trainer, first, second)
    assert [line["learner/num_parts"] for line in run.lines] == [2, 1]
    assert (run.buffer.advanced, saved) == ([1, 2], [1, 2])
    assert run.buffer.held == [0, 1, 0]


async def test_a_learner_that_stops_in_a_part_discards_its_gradient(saved, caplog):
    run = Run(configure())
    await run.buffer.lend(*make_groups(0, 2))
    await run.until_held(2, num_calls=1)
    run.learner.stop()
    await run.end()
    assert "discarded the gradient of 2 groups of step 1" in caplog.text
    assert (run.buffer.advanced, saved) == ([], [])
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
    assert run.lines[0]["learner/num_parts"] == 2
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
    assert run.lines[0]["learner/num_parts"] == 1


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

    clock = SimpleNamespace(perf_counter=lambda: now_s, time=lambda: now_s)
    monkeypatch.setattr("learners.learner.time", clock)
    run = Run(configure())
    monkeypatch.setattr(run.buffer, "take", costing(1.0, run.buffer.take))
    monkeypatch.setattr(run.trainer, "accumulate", costing(100.0, run.trainer.accumulate))
    await run.buffer.lend(make_groups(0, 3)[0])
    await run.until_held(1, num_calls=1)
    await run.buffer.lend(*make_groups(0, 3)[1:])
    await run.end()
    assert (run.lines[0]["learner/wait_s"], run.lines[0]["learner/num_parts"]) == (2.0, 2)
