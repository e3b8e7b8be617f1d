"""`streamrl status` of a run that works, of one whose generator froze, and of one that is over."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.display.view import read_wait
from streamrl.cli.main import main
from streamrl.cli.status import read_status
from streamrl.diagnosis import diagnose
from tests.system.conftest import Launched, slow_reward
from tests.system.test_launch import _set


def causes(folder: Path) -> dict[str, str]:
    found = diagnose(asyncio.run(read_status(str(folder))).reading)
    return {finding.cause: finding.sentence for finding in found}


def leases(folder: Path) -> list[str]:
    stats = asyncio.run(read_status(str(folder))).reading.stats
    return [lease for report in stats.generators for lease in report.lease_ids] if stats else []


def test_a_frozen_generator_is_named_by_the_learner_and_by_status(
    launch: Callable[..., Launched], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its reward lasts longer than a heartbeat, so it is frozen with leases it has reported."""
    settings = (
        f"data.reward={slow_reward(tmp_path, seconds=1.5)}",
        "generator.count=1",
        "buffer.max_staleness=0",
        "buffer.lease_ttl_s=60",
        "run.stall_s=3",
        "run.max_steps=1000",
    )
    run = launch(*_set(*settings))
    run.until_step(1)
    run.until(lambda: main(["status", str(run.folder)]) == 0)
    output = capsys.readouterr().out
    assert "run: step" in output
    assert "healthy" in output
    generator = run.child("generator-0")

    def frozen_with_leases() -> bool:
        generator.send_signal(signal.SIGSTOP)
        if leases(run.folder):
            return True
        generator.send_signal(signal.SIGCONT)
        return False

    run.until(frozen_with_leases)
    run.until(lambda: "held by generator-0" in run.log("learner"))
    run.until(lambda: "generator_silent" in causes(run.folder))
    found = causes(run.folder)
    assert "of 4 groups at version" in found["too_few_groups"]
    assert "held by generator-0 (version" in found["too_few_groups"]
    assert "generator-0 has not reported for" in found["generator_silent"]
    assert main(["status", str(run.folder), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["healthy"] is False
    assert output["learner"]["activity"] == "waits for groups"
    generator.send_signal(signal.SIGCONT)
    run.until_step(len(run.lines) + 1)
    run.until(lambda: "goes on after" in run.log("learner"))
    assert run.lines[-1]["learner/stalls"] >= 1
    run.until(lambda: not causes(run.folder))
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert main(["status", str(run.folder)]) == 0
    assert "has ended" in capsys.readouterr().out


def test_a_group_that_a_step_waits_for_is_named_while_others_are_finished(
    launch: Callable[..., Launched], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A generator is frozen with the one group that it has room for; the other one goes on."""
    settings = (
        f"data.reward={slow_reward(tmp_path, seconds=0.5)}",
        "generator.max_num_seqs=4",
        "buffer.max_staleness=1",
        "buffer.lease_ttl_s=100",
        "run.stall_s=4",
        "run.max_steps=1000",
    )
    run = launch(*_set(*settings))
    run.until_step(1)
    run.until_generators(2)
    generator = run.child("generator-0")

    def frozen_with_a_lease() -> bool:
        generator.send_signal(signal.SIGSTOP)
        stats = asyncio.run(read_status(str(run.folder))).reading.stats
        reports = () if stats is None else stats.generators
        if any(r.lease_ids and r.generator_id == "generator-0" for r in reports):
            return True
        generator.send_signal(signal.SIGCONT)
        return False

    def shown() -> dict[str, Any]:
        main(["status", str(run.folder), "--json"])
        output: dict[str, Any] = json.loads(capsys.readouterr().out)
        return output

    run.until(frozen_with_a_lease)
    run.until(lambda: shown()["waits_for"] != "")
    run.until(lambda: "on generator-0: " in read_wait(run.folder))
    run.until(lambda: "due_group" in causes(run.folder))
    found = causes(run.folder)
    assert found["due_group"].startswith(f"step {len(run.lines) + 1} waits for prompt ")
    assert found["due_group"].endswith("raise buffer.max_staleness or set buffer.overdue: train")
    assert "too_few_groups" not in found
    run.until(lambda: "waits for prompt" in run.log("learner"))
    generator.send_signal(signal.SIGCONT)
    run.until_step(len(run.lines) + 1)
    assert max(line["learner/wait_due_s"] for line in run.lines) >= 4
    assert run.lines[-1]["buffer/dropped_stale"] == 0
    run.process.send_signal(signal.SIGINT)
    run.end()


def test_a_run_without_daemons_is_reported_within_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("buffers.try_stats.ANSWER_S", 0.2)
    assert main(["status", "zmq://127.0.0.1:9"]) == 1
    assert "! the buffer has not answered for 0.2 s" in capsys.readouterr().out
    assert main(["status", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
