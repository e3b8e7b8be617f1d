"""Which version the validator begins with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from actors.validation.validator import Validator
from streamrl.config import RunConfig
from streamrl.interfaces import Prompt
from streamrl.samples.record import Decoder
from tests.records import make_group


class Recorded(Validator):
    """Notes the versions that it is to validate."""

    versions: tuple[int, ...] = ()

    async def _validate_and_report(self, policy_version: int, learner_id: str) -> None:
        self.versions = (*self.versions, policy_version)


@pytest.mark.parametrize(("at_start", "validated"), [(True, (0,)), (False, ())])
async def test_the_version_that_a_run_begins_with_is_validated_if_asked_for(
    tmp_path: Path, at_start: bool, validated: tuple[int, ...]
):
    config = RunConfig.model_validate(
        {
            "run": {"folder": str(tmp_path)},
            "model": {"path": "m"},
            "data": {"source": "copy"},
            "validation": {"every": 4, "at_start": at_start},
        }
    )
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
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"source": "copy", "reward": "numeric_answer"}}
    )
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
