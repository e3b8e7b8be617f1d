"""What the learner does with the reports of validators: recorded once, early stop, the last one."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from learners import validations as module
from learners.validations import num_missed
from streamrl.config import RunConfig
from streamrl.config.validation import ValidationSettings
from streamrl.tracking.jsonl import best_of
from streamrl.types import LearnerActivity, ValidationReport
from tests.training import make_groups
from tests.unit.test_learner import GROUPS_PER_STEP, Run, configure


def validated(config: RunConfig, **settings: object) -> RunConfig:
    section = ValidationSettings.model_validate({"every": 2, **settings})
    return config.model_copy(update={"validation": section})


def report(policy_version: int, mean: float = 0.5, **metrics: float) -> ValidationReport:
    pairs = (("validation/mean@1", mean), *metrics.items())
    return ValidationReport(policy_version=policy_version, learner_id="", metrics=pairs)


async def lend_batch(run: Run) -> None:
    await run.buffer.lend(*make_groups(num_groups=GROUPS_PER_STEP))


async def until(run: Run, condition: object) -> None:
    async with asyncio.timeout(120):
        while not condition():
            assert not run.task.done(), run.task
            await asyncio.sleep(0.005)


async def test_a_report_is_recorded_once_and_in_the_line_of_the_next_step():
    run = Run(validated(configure(max_steps=2), at_end=False))
    await until(run, lambda: run.buffer.held)
    for _ in range(3):
        run.sender.report(report(0, 0.25))
    assert run.records.validated[0]["validation/mean@1"] == 0.25
    await lend_batch(run)
    await until(run, lambda: run.records.lines)
    await lend_batch(run)
    await run.end()
    first, second = run.records.lines
    assert (first["validation/mean@1"], first["validation/policy_version"]) == (0.25, 0)
    assert "validation/mean@1" not in second


async def test_the_run_ends_once_its_validations_do_not_get_better(caplog):
    caplog.set_level("INFO")
    patience = {"patience": 2, "min_improvement": 0.05}
    run = Run(validated(configure(max_steps=9), at_end=False, early_stop=patience))
    await until(run, lambda: run.buffer.held)
    for version, mean in ((0, 0.5), (2, 0.6), (4, 0.64)):
        run.sender.report(report(version, mean))
    await lend_batch(run)
    await until(run, lambda: run.records.lines and len(run.buffer.held) > 1)
    run.sender.report(report(6, 0.63))
    await lend_batch(run)
    await run.end()
    assert [line["step"] for line in run.records.lines] == [1, 2]
    assert run.buffer.acknowledged[-1] == 2
    assert (await run.buffer.stats()).finished
    sentence = (
        "stopped early at version 2 of 9: validation/mean@1 has not become better than 0.6, that "
        "of version 2, in 2 validations"
    )
    assert caplog.messages.count(sentence) == 1
    assert run.reporter.fields["ended_early"] == sentence


async def test_the_last_version_is_sent_and_waited_for_after_its_checkpoint():
    run = Run(validated(configure(max_steps=1), every=5))
    await until(run, lambda: run.buffer.held)
    await lend_batch(run)
    await until(run, lambda: run.reporter.activities[-1] is LearnerActivity.VALIDATING)
    assert run.sender.is_last
    assert run.records.saved == [1]
    assert not (await run.buffer.stats()).finished
    run.sender.report(report(1))
    await run.end()
    assert (await run.buffer.stats()).finished


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_signal_or_a_limit_ends_the_wait_for_the_last_validation(caplog, monkeypatch):
    run = Run(validated(configure(max_steps=1)))
    await until(run, lambda: run.buffer.held)
    await lend_batch(run)
    await until(run, lambda: run.reporter.activities[-1] is LearnerActivity.VALIDATING)
    run.learner.stop()
    await run.end()
    assert warnings_of(caplog) == []
    run = Run(validated(configure(max_steps=1), end_wait_s=0.01))
    await lend_batch(run)
    await run.end()
    assert warnings_of(caplog) == [
        "the last version, 1, is not validated: it took longer than validation.end_wait_s (0.01 s)"
    ]
    monkeypatch.setattr(module, "ABSENT_S", 0.01)
    run = Run(validated(configure(max_steps=1)))
    monkeypatch.setattr(run.sender, "validators", dict)
    await lend_batch(run)
    await run.end()
    assert "no validator has reported for" in warnings_of(caplog)[-1]


async def test_a_validator_that_went_long_ago_is_not_waited_for(caplog, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    run = Run(validated(configure(max_steps=2)))
    await lend_batch(run)
    await until(run, lambda: run.records.lines)
    now_s = 61.0
    monkeypatch.setattr(run.sender, "validators", dict)
    await lend_batch(run)
    await run.end()
    assert "no validator has reported for 61 s" in warnings_of(caplog)[-1]


@pytest.mark.parametrize(
    ("versions", "missed"), [({0}, 0), ({0, 2, 5}, 0), ({0, 4, 6}, 1), ({6}, 0), ({0, 9}, 3)]
)
def test_versions_that_came_due_while_another_was_validated_are_counted(versions, missed):
    assert num_missed(versions, 2) == missed


def test_the_best_validation_is_by_the_metric_alone():
    values = {0: {"a": 1.0}, 2: {"b": 9.0}, 4: {"a": 1.04}, 6: {"a": 0.5}}
    assert best_of(values, "a", "highest") == (4, 1.04, 1)
    assert best_of(values, "a", "highest", min_improvement=0.1) == (0, 1.0, 2)
    assert best_of(values, "a", "lowest") == (6, 0.5, 0)
    assert best_of(values, "c", "lowest") is None


@pytest.mark.parametrize("has_reported", [False, True])
async def test_a_validator_that_no_setting_asks_for_is_waited_for_if_there_is_one(
    has_reported, monkeypatch
):
    """Daemons that are started one by one may be without."""
    data = {"source": "addition", "eval_source": "addition"}
    config = validated(configure(max_steps=1), every=None)
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    assert config.is_validated
    run = Run(config)
    if not has_reported:
        monkeypatch.setattr(run.sender, "validators", dict)
    await until(run, lambda: run.buffer.held)
    await lend_batch(run)
    if has_reported:
        await until(run, lambda: run.reporter.activities[-1] is LearnerActivity.VALIDATING)
        run.sender.report(report(1))
    await run.end()
    assert (LearnerActivity.VALIDATING in run.reporter.activities) is has_reported
    assert run.sender.is_last is has_reported
    assert "validation/num_missed" not in run.records.validated.get(1, {})
