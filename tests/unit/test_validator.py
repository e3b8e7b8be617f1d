"""Which version the validator begins with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.validation.validator import Validator
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings
from streamrl.interfaces import Prompt
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
    validator = Recorded(config, "validator", None, 8, str)
    running = asyncio.create_task(validator.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done()
    assert validator.versions == validated
    running.cancel()
    await asyncio.wait({running})


def test_votes_are_read_with_what_the_chat_template_has_begun():
    """Of a thought without an end nothing votes, also where the template opens it."""
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"source": "copy", "reward": "numeric_answer"}}
    )
    texts = iter(["so 7, or 9", "6 or 9", "so 7</think>9"])
    renderer = SimpleNamespace(decode=lambda _: next(texts))
    own = SimpleNamespace(renderer=renderer, prefill=lambda _, num_turns: "<think>" * num_turns)
    entry = SimpleNamespace(data=DataSettings(source="copy", reward="numeric_answer"))
    stream = SimpleNamespace(entry_at=lambda _: entry)
    runner = SimpleNamespace(stream=stream, of=lambda _: own)
    validator = Validator(config, "validator", runner, 8, str)
    answers = validator._result(Prompt("?", "9"), make_group(0, size=3)).answers
    assert answers == ("<think>so 7, or 9", "<think>6 or 9", "9")
