"""Which version the validator begins with."""

import asyncio
from pathlib import Path

import pytest

from actors.validation.validator import Validator
from streamrl.config import RunConfig


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
