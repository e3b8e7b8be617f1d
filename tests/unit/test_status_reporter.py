"""The learner's reports: its file at each interval, the log once an activity lasts too long."""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from learners import status_reporter as module
from learners.status_reporter import StatusReporter
from streamrl.config.validation import ValidationSettings
from streamrl.errors import TransportError
from streamrl.run_folder import read_learner
from streamrl.types import (
    BufferStats,
    GeneratorStatus,
    LearnerActivity,
    TrajectoryGroup,
    ValidatorStatus,
)
from tests.records import lease_one, make_group
from tests.training import make_config

STALL_S = 0.05


class Sender:
    present: Mapping[str, ValidatorStatus] = {}

    def validators(self) -> Mapping[str, ValidatorStatus]:
        return self.present

    def gauges(self) -> dict[str, float]:
        return {"num_receivers": 2.0}

    def validating(self) -> dict[int, ValidatorStatus]:
        return {20: ValidatorStatus(is_busy=True, num_done=3, num_prompts=32)}

    def stored(self) -> str:
        return ""

    def behind(self) -> tuple[str, ...]:
        return ("gen-1",)

    def left_out(self) -> tuple[str, ...]:
        return ()


class Unreachable(MemoryBuffer):
    async def stats(self) -> BufferStats:
        raise TransportError("nobody listens at zmq://there")


def make_buffer(kind: type[MemoryBuffer] = MemoryBuffer) -> MemoryBuffer:
    ledger = Ledger(groups_per_step=2, max_staleness=1)
    return kind(BufferState[TrajectoryGroup](ledger, lease_ttl_s=60.0))


def make_reporter(folder: Path, buffer: MemoryBuffer) -> StatusReporter:
    (folder / "run").mkdir()
    run = {"name": "run", "folder": folder, "stall_s": STALL_S}
    return StatusReporter(make_config(run=run), buffer, Sender())


async def reporting(reporter: StatusReporter, until: Callable[[], bool]) -> None:
    task = asyncio.create_task(reporter.run())
    async with asyncio.timeout(120):
        while not until():
            assert not task.done()
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.005)
    caplog.set_level(logging.INFO)


async def test_a_wait_is_explained_again_when_it_doubles_and_its_end_is_logged(tmp_path, caplog):
    buffer = make_buffer()
    await buffer.attach(3, None)
    await lease_one(buffer, "gen-1/0", "gen-1", 0.0)
    reporter = make_reporter(tmp_path, buffer)
    reporter.set_activity(LearnerActivity.WAITING, policy_version=3, learner_term=1)

    def stalls() -> list[str]:
        return [record.message for record in caplog.records if "stalled" in record.message]

    await reporting(reporter, lambda: len(stalls()) == 3)
    durations = [float(record.args[0]) for record in caplog.records if "stalled" in record.message]
    assert durations[0] >= STALL_S
    assert durations[1] >= 2 * durations[0]
    assert durations[2] >= 2 * durations[1]
    assert "0 of 2 groups at version 3; 1 leased and not reported yet" in stalls()[0]
    assert "no generator reports" in stalls()[0]
    assert reporter.num_stalls == 1
    reporter.set_activity(LearnerActivity.WAITING)
    assert "goes on" not in caplog.text
    reporter.set_activity(LearnerActivity.COMPUTING)
    assert "goes on after" in caplog.records[-1].message
    await reporting(reporter, lambda: len(stalls()) == 4)
    assert "step 4 has computed for" in stalls()[3]
    assert reporter.num_stalls == 2


async def test_the_file_names_the_group_that_is_waited_for_until_the_wait_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr("streamrl.diagnosis.causes.SHOWN_AFTER_S", 0.0)
    buffer = make_buffer()
    await buffer.attach(0, None)
    slow = await lease_one(buffer, "gen-1/0", "gen-1", 0.0)
    for version in (0, 1):
        for number in (1, 2):
            lease = await lease_one(buffer, f"gen-1/{version}{number}", "gen-1", 0.0)
            await buffer.put(lease.lease_id, make_group(lease.prompt_index, version=version))
        if version == 0:
            await buffer.take(2, 0, 0.0)
            await buffer.advance(1)
    assert not await buffer.take(2, 1, 0.0)
    reporter = make_reporter(tmp_path, buffer)
    reporter.set_activity(LearnerActivity.WAITING, policy_version=1, learner_term=1)

    def waits_for() -> str:
        learner = read_learner(tmp_path / "run")
        return "" if learner is None else learner.waits_for

    await reporting(reporter, lambda: waits_for() != "")
    assert re.match(r"no generator reports to the buffer, for \d+ s", waits_for())
    await buffer.heartbeat(
        GeneratorStatus(generator_id="gen-2", session="of gen-2", policy_version=1)
    )
    await reporting(reporter, lambda: "prompt" in waits_for())
    assert waits_for().startswith(
        f"step 2 waits for prompt {slow.prompt_index}, which no generator reports"
    )
    reporter.set_activity(LearnerActivity.COMPUTING)
    await reporting(reporter, lambda: waits_for() == "")


async def test_an_unreachable_buffer_is_the_finding(tmp_path, caplog):
    reporter = make_reporter(tmp_path, make_buffer(Unreachable))
    await reporting(reporter, lambda: "stalled" in caplog.text)
    assert "nobody listens at zmq://there" in caplog.text


async def test_the_file_holds_the_activity_to_the_end(tmp_path):
    reporter = make_reporter(tmp_path, make_buffer())
    file = tmp_path / "run" / "learner.json"
    reporter.set_activity(LearnerActivity.SAVING, policy_version=7)
    await reporting(reporter, file.exists)
    reporter.set_activity(LearnerActivity.ENDED)
    task = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    status = json.loads(file.read_text())
    assert status["activity"] == "has ended"
    assert status["policy_version"] == 7
    assert (status["num_receivers"], status["behind"]) == (2, ["gen-1"])
    assert [path.name for path in file.parent.iterdir()] == ["learner.json"]


async def test_the_file_is_kept_up_to_date_where_no_other_can_be_written(tmp_path):
    """As on a full disk, which takes writes into a file but no new one."""
    reporter = make_reporter(tmp_path, make_buffer())
    file = tmp_path / "run" / "learner.json"
    reporter.set_activity(LearnerActivity.SAVING, unsaved="a sentence " * 50)
    await reporting(reporter, file.exists)
    file.with_name(".learner.json.unfinished").mkdir()
    reporter.set_activity(LearnerActivity.SAVING, policy_version=7, unsaved="no space left")
    await reporting(reporter, lambda: json.loads(file.read_text())["policy_version"] == 7)
    assert json.loads(file.read_text())["unsaved"] == "no space left"


async def test_a_validator_counts_as_absent_from_the_first_step_on_or_where_one_has_been(
    tmp_path, monkeypatch
):
    """It begins then; daemons that are started one by one may be without one by default."""
    (tmp_path / "run").mkdir()
    config = make_config(run={"name": "run", "folder": tmp_path, "stall_s": STALL_S})
    held_out = config.data.model_copy(update={"eval_source": "addition"})
    by_default = config.model_copy(update={"data": held_out})
    asked = by_default.model_copy(update={"validation": ValidationSettings(every=2)})
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    for one, absent in (
        (config, [None] * 4),
        (by_default, [None, None, 0, 7]),
        (asked, [0, 7, 0, 7]),
    ):
        sender, now_s = Sender(), 0.0
        reporter = StatusReporter(one, make_buffer(), sender)
        found = []
        for version, is_there in ((0, False), (1, False), (2, True), (3, False)):
            sender.present = {"validator": ValidatorStatus()} if is_there else {}
            now_s += 7.0
            reporter.update(policy_version=version)
            found.append(reporter._current().no_validator_s)
        assert found == absent
