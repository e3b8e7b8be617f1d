"""Environments are closed however their episodes end, and what they return is checked."""

import asyncio
import dataclasses
import threading
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from actors import concurrency
from actors.concurrency import DeadlineError, deadline
from actors.environments import SingleTurn, make_environment
from actors.episodes.episode import EpisodeRun
from actors.episodes.group import unbuffered_lease
from actors.episodes.mixed_runner import open_group
from streamrl import wire
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import EnvironmentContext, Observation, Transition
from streamrl.types import Completion, SamplingParams
from streamrl.user_code import load_user_code
from tests.unit.episodes.environments import Turns
from tests.unit.test_generator import FakeEngine, FakeRenderer, Prompts, Run

SAMPLING = SamplingParams(max_new_tokens=4)


class Counted(Turns):
    """Counts what is open, and may fail at `failing`."""

    failing = ""
    num_open = 0
    num_closed = 0

    async def start(self, context: EnvironmentContext) -> Observation:
        type(self).num_open += 1
        if self.failing == "start":
            raise RolloutError("start failed")
        return await super().start(context)

    async def step(self, completion: Completion) -> Transition:
        if self.failing == "step":
            raise RolloutError("step failed")
        if self.failing == "hang":
            await asyncio.Event().wait()
        return await super().step(completion)

    async def close(self) -> None:
        await asyncio.sleep(0)
        type(self).num_open -= 1
        type(self).num_closed += 1


def counted(failing: str = "", **more: object) -> type[Counted]:
    return type("Own", (Counted,), {"failing": failing, "num_open": 0, "num_closed": 0, **more})


def run(environment: type[Turns] | type[SingleTurn]):
    context = EnvironmentContext(Prompts()[0], (7,), FakeRenderer())
    running = EpisodeRun(FakeEngine(), environment, max_model_len=100, deadline_s=60.0)
    return running.run(context, SAMPLING)


@pytest.mark.parametrize("failing", ["", "start", "step"])
async def test_an_environment_is_closed_once_however_its_episode_ends(failing):
    environment = counted(failing)
    if failing:
        with pytest.raises(RolloutError, match=f"^{failing} failed$"):
            await run(environment)
    else:
        await run(environment)
    assert (environment.num_open, environment.num_closed) == (0, 1)


async def test_an_own_single_turn_is_closed_as_any_other():
    closed: list[str] = []

    class Own(SingleTurn):
        async def close(self) -> None:
            closed.append("own")

    for environment in (Own, SingleTurn):
        await run(environment)
    assert closed == ["own"]


async def test_siblings_of_one_that_failed_are_closed():
    class OneFails(counted()):
        async def step(self, completion: Completion) -> Transition:
            if self.context.episode_index == 1:
                raise RolloutError("the second one")
            await asyncio.Event().wait()

    runner = dataclasses.replace(Run().runner, make_environment=OneFails, group_size=5)
    with pytest.raises(RolloutError, match="the second one"):
        await runner.run(unbuffered_lease("test", 0))
    assert (OneFails.num_open, OneFails.num_closed) == (0, 5)


async def test_a_canceled_episode_is_closed_and_stays_canceled():
    async def failing_close(self) -> None:
        await Counted.close(self)
        raise RolloutError("close failed")

    environment = counted("hang", close=failing_close)
    running = asyncio.create_task(run(environment))
    while not environment.num_open:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (environment.num_open, environment.num_closed) == (0, 1)


async def test_a_close_that_fails_costs_its_group_unless_something_failed_before(caplog):
    async def failing_close(self) -> None:
        raise RolloutError("close failed")

    with pytest.raises(RolloutError, match=r"^close failed$"):
        await run(counted(close=failing_close))
    with pytest.raises(RolloutError, match=r"^step failed$"):
        await run(counted("step", close=failing_close))
    assert "close failed" in caplog.text


def unmade() -> Turns:
    raise ConfigError("environment x: ConnectionError: away")


class Poetic(Turns):
    async def start(self, context: EnvironmentContext) -> Observation:
        return Observation(messages=({"role": "poet", "content": "roses"},))


class StrictRenderer(FakeRenderer):
    def encode_messages(self, messages: object, tools: object = ()) -> tuple[int, ...]:
        raise ConfigError("data.chat_template: it cannot render a conversation: no role poet")


@pytest.mark.parametrize(
    ("environment", "sentence"), [(unmade, "x: ConnectionError: away"), (Poetic, "no role poet")]
)
async def test_what_one_episode_cannot_do_costs_its_group(environment, sentence):
    runner = dataclasses.replace(
        Run().runner, make_environment=environment, renderer=StrictRenderer()
    )
    with pytest.raises(RolloutError, match=f"{sentence}$"):
        await runner.run(unbuffered_lease("test", 0))


async def test_a_close_that_hangs_holds_nobody_up(monkeypatch, caplog):
    monkeypatch.setattr(concurrency, "CLOSE_S", 0.05)

    async def hanging_close(self) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(120):
        rollout = await run(counted(close=hanging_close))
    assert len(rollout.turns) == 3
    assert "close of an environment is given up after 0.05 s" in caplog.text


def returning(**what: object) -> type[Turns]:
    async def start(self, context: EnvironmentContext) -> object:
        return what.get("start", Observation(token_ids=(7,)))

    async def step(self, completion: Completion) -> object:
        return what.get("step", Transition())

    return type("Returning", (Turns,), {"start": start, "step": step})


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"start": "hello"}, "start returned str 'hello'; it must be an Observation"),
        ({"start": Observation(token_ids="hi")}, "start: observation.token_ids was str 'hi'"),
        (
            {"start": Observation(token_ids=np.array([9, 9]))},
            "start: observation.token_ids was nda",
        ),
        (
            {"start": Observation(token_ids=(np.array([9, 9]),))},
            "start: one of observation.token_ids was ndarray",
        ),
        (
            {"start": Observation(token_ids=(torch.tensor([9, 9]),))},
            "start: one of observation.token_ids was Tensor",
        ),
        ({"start": Observation(media=None)}, "start: observation.media was NoneType None"),
        ({"start": Observation(messages=None)}, "start: observation.messages was NoneType None"),
        ({"start": Observation(tools=None)}, "start: observation.tools was NoneType None"),
        ({"start": Observation(token_ids=("h",))}, "start: one of observation.token_ids was str"),
        ({"start": Observation(token_ids=(-3,))}, "start: one of observation.token_ids was int -3"),
        ({"start": Observation(token_ids=(2**31,))}, "start: one of observation.token_ids was int"),
        ({"start": Observation(media=("x",))}, "start: one of observation.media was str 'x'; it"),
        ({"step": Transition(in_loss=None)}, "step: in_loss was NoneType None; it must be a bool"),
        ({"step": Transition(done="no")}, "step: done was str 'no'; it must be a bool"),
        ({"start": Observation(messages=("hi",))}, "start: one of observation.messages was str"),
        ({"step": (1.0, True)}, r"step returned tuple \(1.0, True\); it must be a Tra"),
        ({"step": Transition(observation=(5,))}, "step returned tuple .*; it must be an Obs"),
        (
            {"step": Transition(reward=float("nan"))},
            "step: reward was float nan; it must",
        ),
        ({"step": Transition(reward=np.array([0.5, 0.5]))}, "step: reward was ndarray array"),
        ({"step": Transition(metrics={"a": 10**400})}, "step: a was int 1000.*; it must be a fin"),
        ({"step": Transition(reward="good")}, "step: reward was str 'good'; it must be a finite"),
        (
            {"step": Transition(metrics={"a": None})},
            "step: a was NoneType None; it must",
        ),
        ({"step": Transition(metrics={1: 0.5})}, "step: the name of a metric was int 1; it must"),
        ({"step": Transition(num_tool_calls=-1)}, "step: num_tool_calls was int -1; it must be a"),
        ({"step": Transition(num_tool_calls=2**64)}, "step: num_tool_calls was int 1844"),
        ({"step": Transition(num_tool_calls=1.0)}, "step: num_tool_calls was float 1.0; it must"),
    ],
)
async def test_what_an_environment_returns_is_checked(what, sentence):
    with pytest.raises(RolloutError, match=f"^the environment's {sentence}"):
        await run(returning(**what))


@pytest.mark.parametrize(
    ("one", "half"), [(True, np.float32(0.5)), (np.int64(1), torch.tensor(0.5))]
)
async def test_numbers_of_other_libraries_are_recorded_as_numbers(one, half):
    transition = Transition(reward=half, metrics={"half": half}, num_tool_calls=one, done=True)
    rollout = await run(returning(step=transition))
    (turn,) = rollout.turns
    assert (turn.reward, type(turn.num_tool_calls), turn.num_tool_calls) == (0.5, int, 1)
    assert rollout.metrics["half"] == 0.5


async def test_an_environment_may_return_records_of_its_own():
    class Board(Observation):
        def __init__(self, token_ids: tuple[int, ...]) -> None:
            super().__init__(token_ids=token_ids)

    class Boards(Turns):
        async def start(self, context: EnvironmentContext) -> Observation:
            return Board(context.prompt_token_ids)

        def answer(self, completion: Completion) -> Observation:
            return Board((9,))

    own, plain = await run(Boards), await run(Turns)
    sent = [wire.encode(structs.replace(rollout, metrics={})) for rollout in (own, plain)]
    assert sent[0] == sent[1]


async def test_lists_and_numbers_of_other_libraries_are_those_that_are_compared_and_sent():
    class Loose(Turns):
        async def start(self, context: EnvironmentContext) -> Observation:
            return Observation(token_ids=list(map(np.int64, context.prompt_token_ids)), media=[])

        def answer(self, completion: Completion) -> Observation:
            return Observation(token_ids=[np.int64(9)], media=[])

        async def step(self, completion: Completion) -> Transition:
            return dataclasses.replace(await super().step(completion), in_loss=np.bool_(True))

    loose, plain = await run(Loose), await run(Turns)
    assert len(loose.segments) == 1
    sent = [wire.encode(structs.replace(rollout, metrics={})) for rollout in (loose, plain)]
    assert sent[0] == sent[1]


# State that siblings share.

SHARING = """
from asyncio import Event
from contextlib import asynccontextmanager
from streamrl.interfaces import Observation, Transition

events = []

class Sharing:
    @classmethod
    @asynccontextmanager
    async def open_group(cls, context):
        events.append(f"open {context.seed}")
        if context.prompt.content == "broken":
            raise OSError("no database")
        if context.prompt.content == "away":
            await Event().wait()
        try:
            yield {"seed": context.seed}
        finally:
            events.append("close group")

    async def start(self, context):
        self._index = context.episode_index
        events.append(("start", context.shared["seed"]))
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion):
        if self._index == FAILING:
            raise KeyError("level")
        return Transition()

    async def close(self):
        events.append("close")
"""


def sharing(folder: Path, failing: int = -1) -> str:
    path = folder / f"sharing{failing + 1}.py"
    path.write_text(SHARING.replace("FAILING", str(failing)))
    return f"{path}:Sharing"


async def group_of(name: str, deadline_s: float = 60.0, **changes: object):
    (entry,) = Run(environment=name).config.entries
    runner = dataclasses.replace(
        Run().runner,
        make_environment=partial(make_environment, entry),
        open_group=partial(open_group, entry, deadline_s=deadline_s),
        group_size=3,
        **changes,
    )
    return await runner.run(unbuffered_lease("test", 0))


def events_of(name: str) -> list[object]:
    return load_user_code("generator.environment", name).start.__globals__["events"]


async def test_what_siblings_share_is_opened_before_them_and_closed_after_them(tmp_path):
    name = sharing(tmp_path)
    await group_of(name)
    opened, *between, closed = events_of(name)
    seed = int(opened.removeprefix("open "))
    assert closed == "close group"
    assert sorted(map(str, between)) == sorted([str(("start", seed))] * 3 + ["close"] * 3)


async def test_what_siblings_share_is_closed_after_a_failure(tmp_path):
    name = sharing(tmp_path, failing=1)
    with pytest.raises(RolloutError, match=r"sharing2\.py:Sharing: KeyError: 'level'"):
        await group_of(name)
    assert events_of(name)[-1] == "close group"
    assert events_of(name).count("close group") == 1


@pytest.mark.parametrize(
    ("content", "deadline_s", "sentence"),
    [
        ("broken", 60.0, r"open_group: OSError: no database"),
        (
            "away",
            0.01,
            r"open_group has not opened within generator\.group_deadline_s, which is 0\.01 s",
        ),
    ],
)
async def test_what_cannot_be_opened_costs_its_group(tmp_path, content, deadline_s, sentence):
    class Unopened(Prompts):
        def __getitem__(self, prompt_index: int):
            return dataclasses.replace(super().__getitem__(prompt_index), content=content)

    with pytest.raises(RolloutError, match=sentence):
        await group_of(sharing(tmp_path), deadline_s=deadline_s, prompts=Unopened())


async def test_a_group_that_is_dropped_while_it_waits_closes_what_it_shares():
    closed: list[bool] = []

    @asynccontextmanager
    async def opened(context: EnvironmentContext):
        try:
            yield None
        finally:
            closed.append(True)

    engine = FakeEngine()
    engine.open.clear()
    runner = dataclasses.replace(Run().runner, open_group=opened, engine=engine)
    running = asyncio.create_task(runner.run(unbuffered_lease("test", 0)))
    while not engine.num_running:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed == [True]


@pytest.mark.parametrize(
    ("is_canceled", "expected"), [(False, DeadlineError), (True, asyncio.CancelledError)]
)
async def test_a_cancellation_from_elsewhere_at_a_deadline_stays_one(is_canceled, expected):
    async def limited() -> None:
        async with deadline(0.01):
            await asyncio.Event().wait()

    task = asyncio.create_task(limited())
    await asyncio.sleep(0)
    if is_canceled:
        asyncio.get_running_loop().call_later(0.01, task.cancel)
    # Both are due now, before the task goes on.
    threading.Event().wait(0.05)
    with pytest.raises(expected):
        await task
    assert task.cancelling() == is_canceled
