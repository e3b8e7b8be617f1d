"""Which version the validator begins with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from actors import validation
from actors.validation import Validator
from streamrl.config import RunConfig
from streamrl.config.validation import ValidationSettings
from streamrl.interfaces import Prompt
from streamrl.samples.record import Decoder
from streamrl.shutdown import Shutdown
from streamrl.types import ValidationReport
from tests.records import make_group
from tests.waiting import until


def make_config(folder: Path, **validation: object) -> RunConfig:
    given = {"model": {"path": "m"}, "data": {"source": "copy"}, "validation": validation}
    given["weights"] = {"address": "tcp://127.0.0.1:9"}
    return RunConfig.model_validate({"run": {"folder": str(folder)}, **given})


class Recorded(Validator):
    """Notes the versions that it is to validate."""

    versions: tuple[int, ...] = ()

    async def _validate_and_report(self, policy_version: int, learner_id: str) -> None:
        self.versions = (*self.versions, policy_version)


@pytest.mark.parametrize(("at_start", "validated"), [(True, (0,)), (False, ())])
async def test_the_version_that_a_run_begins_with_is_validated_if_asked_for(
    tmp_path: Path, at_start: bool, validated: tuple[int, ...]
):
    config = make_config(tmp_path, every=4, at_start=at_start)
    validator = Recorded(config, "validator", None, 8, Decoder(str))
    running = asyncio.create_task(validator.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done()
    assert validator.versions == validated
    running.cancel()
    await asyncio.wait({running})


def test_what_was_extracted_votes_and_where_nothing_was_the_whole_turn():
    """With what the chat template has begun of it: no number of a thought votes."""
    config = make_config(Path("runs"))
    texts = iter(["so 7, or 9", "6 or 9 "])
    renderer = SimpleNamespace(decode=lambda _: next(texts))
    own = SimpleNamespace(renderer=renderer, prefill=lambda _, num_turns: "<think>" * num_turns)
    runner = SimpleNamespace(of=lambda _: own)
    validator = Validator(config, "validator", runner, 8, Decoder(str))
    group = make_group(0, size=3)
    members = zip(group.trajectories, ("", None, "9.0"), strict=True)
    found = tuple(structs.replace(t, extracted=extracted) for t, extracted in members)
    group = structs.replace(group, trajectories=found)
    answers = validator._result(Prompt("?", "9"), group).answers
    assert answers == ("<think>so 7, or 9", "<think>6 or 9", "9")


async def test_after_a_validation_it_rests_but_for_the_last_version(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ValidationSettings, "rest_s", lambda self, took_s: 0.05)
    validator = Validator(make_config(tmp_path, every="auto"), "validator", None, 8, Decoder(str))
    hellos: list[bool] = []
    monkeypatch.setattr(
        validator._receiver, "say_hello", lambda: hellos.append(validator._status.is_resting)
    )

    async def validate(policy_version: int, learner_id: str) -> ValidationReport:
        return ValidationReport(policy_version=policy_version, learner_id="", metrics=())

    monkeypatch.setattr(validator, "validate", validate)
    await validator._validate_and_report(0, "")
    assert hellos == [True]
    last = object()
    validator._loaded.put_nowait(last)
    assert await validator._next_update() is last
    assert hellos == [True], "it came before the rest was over"
    waiting = asyncio.create_task(validator._next_update())
    await until(lambda: hellos == [True, False])
    validator._loaded.put_nowait(last)
    assert await waiting is last


@pytest.mark.parametrize("ending", ["step", "end", "signal"])
async def test_its_engine_is_made_once_the_run_has_made_a_step(ending: str, monkeypatch):
    """The first step has the cores to itself."""
    monkeypatch.setattr(validation, "ASK_S", 0.01)
    shutdown, stats = Shutdown(), SimpleNamespace(policy_version=0, is_over=False)

    async def answer(_: object) -> tuple[SimpleNamespace, str]:
        return stats, ""

    monkeypatch.setattr(validation, "try_stats", answer)
    waiting = asyncio.create_task(validation._first_step(None, shutdown))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    match ending:
        case "step":
            stats.policy_version = 1
        case "end":
            stats.is_over = True
        case "signal":
            shutdown.requested.set()
    assert await asyncio.wait_for(waiting, 120) is (ending == "step")
