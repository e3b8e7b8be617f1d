"""SIGTERM in every state of a learner: what it has trained is saved, whatever it waits for."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from learners.executor import lockstep
from streamrl.errors import TransportError
from streamrl.types import BufferStats, TakenBatch
from tests.training import make_groups
from tests.unit.test_learner import PartsBuffer, Run, configure
from tests.waiting import until

NEVER = 3600.0


class SilentBuffer(PartsBuffer):
    """Answers no request of the names in `silent`; `asked` are those that it has not answered."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.asked: list[str] = []

    async def _maybe_silent(self, name: str) -> None:
        if name in self.silent:
            self.asked.append(name)
            await asyncio.sleep(NEVER)

    async def attach(self, *arguments: Any) -> BufferStats:
        await self._maybe_silent("attach")
        return await super().attach(*arguments)

    async def take(self, *arguments: Any, **options: Any) -> TakenBatch:
        await self._maybe_silent("take")
        return await super().take(*arguments, **options)

    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats:
        await self._maybe_silent("advance")
        return await super().advance(policy_version, steered_bound)

    async def acknowledge(self, policy_version: int) -> None:
        await self._maybe_silent("acknowledge")
        await super().acknowledge(policy_version)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.test_learner.PartsBuffer", SilentBuffer)
    monkeypatch.setattr("learners.session.GOODBYE_S", 0.05)
    monkeypatch.setattr(lockstep, "GIVE_UP_S", 0.05)


@pytest.fixture
async def hung() -> AsyncIterator[threading.Event]:
    """Ends what hangs in a thread, once the test is over."""
    event = threading.Event()
    yield event
    event.set()


def start(silent: str, *, max_steps: int = 3, every: int = 100) -> Run:
    run = Run(configure(max_steps=max_steps, every=every))
    # Before the learner has had a turn.
    run.buffer.silent = {silent} - {""}
    return run


async def train(run: Run, *steps: int) -> None:
    for step in steps:
        await run.buffer.lend(*make_groups(step - 1, 3))
        await until(lambda step=step: step in run.buffer.advanced or "advance" in run.buffer.asked)


async def stop(run: Run) -> None:
    run.learner.stop()
    await run.end()


async def test_waiting_for_a_buffer_at_the_start():
    run = start("attach")
    await until(lambda: run.buffer.asked == ["attach"])
    with pytest.raises(
        TransportError, match=r"^the buffer at zmq://.* does not answer; stopped at "
    ):
        await stop(run)
    assert run.records.saved == []


@pytest.mark.parametrize(("verb", "every"), [("advance", 100), ("acknowledge", 1)])
async def test_waiting_for_a_buffer_that_is_gone(verb: str, every: int):
    run = start(verb, every=every)
    await train(run, 1)
    await until(lambda: verb in run.buffer.asked)
    run.buffer.silent |= {"acknowledge"}
    sentence = "does not answer; stopped at step 1 of 3, which is saved: the buffer hears"
    with pytest.raises(TransportError, match=sentence):
        await stop(run)
    assert run.records.saved == [1]
    assert [line["step"] for line in run.records.lines] == [1]


async def test_a_step_that_the_buffer_was_not_told_of_is_in_the_books_of_its_checkpoint():
    run = start("advance")
    await train(run, 1)
    await until(lambda: run.buffer.asked == ["advance"])
    with pytest.raises(TransportError):
        await stop(run)
    state = run.learner._session.state
    assert (state.policy_version, state.books.trained) == (1, 3)
    assert not set(state.books.open_prompt_indices) & {0, 1, 2}
    assert run.records.lines[-1]["buffer/trained"] == 3


async def test_waiting_for_groups():
    run = start("")
    await train(run, 1)
    await run.until_held(0, num_calls=2)
    await stop(run)
    assert run.records.saved == [1]


async def test_a_gradient_that_takes_long_is_given_up(hung: threading.Event, caplog):
    run = start("")
    await train(run, 1)
    begun = threading.Event()

    def hang(batch: Any) -> None:
        begun.set()
        hung.wait()

    run.trainer.accumulate = hang
    await run.buffer.lend(*make_groups(1, 3))
    await until(begun.is_set)
    await stop(run)
    assert run.records.saved == [1]
    assert "gave up the gradient of step 2, to save in time" in caplog.text


async def test_a_gradient_that_is_there_in_time_is_a_step(monkeypatch, hung: threading.Event):
    monkeypatch.setattr(lockstep, "GIVE_UP_S", 60.0)
    run = start("")
    begun, accumulate = threading.Event(), run.trainer.accumulate

    def slowly(batch: Any) -> None:
        begun.set()
        hung.wait()
        accumulate(batch)

    run.trainer.accumulate = slowly
    await run.buffer.lend(*make_groups(0, 3))
    await until(begun.is_set)
    run.learner.stop()
    hung.set()
    await run.end()
    assert run.records.saved == [1]


async def test_a_save_that_is_under_way_is_waited_for():
    run = start("", every=1)
    run.records.is_slow = True
    await train(run, 1)
    await until(lambda: len(run.records.writing) == 1)
    run.learner.stop()
    await asyncio.wait({run.task}, timeout=0.2)
    assert not run.task.done()
    run.records.writing[0].set_result(None)
    await run.end()
    assert run.buffer.acknowledged == [1]


async def test_waiting_for_a_buffer_that_lost_its_memory(monkeypatch):
    run = start("")
    await train(run, 1)
    await run.until_held(0, num_calls=2)
    run.buffer.silent = {"attach", "acknowledge"}
    await run.buffer.lose_memory()
    await until(lambda: "attach" in run.buffer.asked)
    with pytest.raises(TransportError, match="stopped at step 1 of 3"):
        await stop(run)
    assert run.records.saved == [1]


async def test_waiting_for_a_validation_of_the_last_version(monkeypatch):
    run = start("", max_steps=1)
    waits = asyncio.Event()

    async def finish(version: int, stopping: asyncio.Event) -> None:
        waits.set()
        await stopping.wait()

    monkeypatch.setattr(run.learner._validations, "finish", finish)
    await train(run, 1)
    await until(waits.is_set)
    await stop(run)
    assert run.records.saved == [1]


async def test_a_buffer_that_does_not_answer_costs_no_step_without_a_signal_either():
    async def refuse(policy_version: int, steered_bound: int = 0) -> BufferStats:
        raise TransportError("the buffer at zmq://x has not answered AdvanceRequest for 60 s")

    run = start("")
    run.buffer.advance = refuse
    await run.buffer.lend(*make_groups(0, 3))
    with pytest.raises(TransportError, match=r"for 60 s; step 1 of 3 is saved$"):
        await run.end()
    assert run.records.saved == [1]
    assert [line["step"] for line in run.records.lines] == [1]
