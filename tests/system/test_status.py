"""`streamrl status` of a run that works, of one whose generator froze, and of one that is over."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.cli.buffer.target import find_target
from streamrl.cli.display.view import notes
from streamrl.cli.main import main
from streamrl.cli.status import read_status
from streamrl.diagnosis import diagnose
from tests.settings import set_options
from tests.system.conftest import Launched, slow_reward


def causes(folder: Path) -> dict[str, str]:
    found = diagnose(asyncio.run(read_status(find_target(str(folder)))).reading)
    return {finding.cause: finding.sentence for finding in found}


def leases(folder: Path) -> list[str]:
    stats = asyncio.run(read_status(find_target(str(folder)))).reading.stats
    return [lease for report in stats.generators for lease in report.lease_ids] if stats else []


@pytest.mark.long
def test_a_frozen_generator_is_named_by_the_learner_and_by_status(
    launch: Callable[..., Launched], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its reward lasts longer than a heartbeat, so it is frozen with leases it has reported."""
    settings = (
        f"data.reward={slow_reward(tmp_path, seconds=1.5)}",
        "buffer.max_staleness=0",
        "buffer.lease_ttl_s=60",
        "run.stall_s=3",
        "run.max_steps=1000",
    )
    run = launch(*set_options(*settings))
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


HOLDING = """
import os, time

def score(episodes):
    try:
        os.rename({hold!r}, {held!r})
    except FileNotFoundError:
        return [1.0 for _ in episodes]
    while os.path.exists({held!r}):
        time.sleep(0.02)
    return [1.0 for _ in episodes]
"""


@pytest.mark.long
def test_a_group_that_a_step_waits_for_is_named_while_others_are_finished(
    launch: Callable[..., Launched], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The reward holds the first group that it scores after the file `hold` is there."""
    hold, held = tmp_path / "hold", tmp_path / "held"
    (tmp_path / "holding.py").write_text(HOLDING.format(hold=str(hold), held=str(held)))
    settings = (
        f"data.reward={tmp_path / 'holding.py'}:score",
        # The group that is held is not leased again, which would not be held.
        "buffer.lease_ttl_s=60",
        "run.stall_s=4",
        "run.max_steps=100000",
    )
    run = launch(*set_options(*settings))
    run.until_step(1)
    hold.touch()

    def waits_for() -> str:
        main(["status", str(run.folder), "--json"])
        return str(json.loads(capsys.readouterr().out)["waits_for"])

    run.until(lambda: waits_for() != "")
    run.until(lambda: " on generator-0: " in " ".join(notes(run.folder)))
    run.until(lambda: "due_group" in causes(run.folder))
    found = causes(run.folder)
    step = len(run.lines) + 1
    expected = rf"step {step} waits for prompt \d+ on generator-0: \d+ tokens, \d+ s; raise buffer"
    assert re.match(expected, found["due_group"]), found
    assert "too_few_groups" not in found
    run.until(lambda: f"step {step} waits for prompt" in run.log("learner"))
    held.unlink()
    run.until_step(step)
    assert run.lines[step - 1]["learner/wait_due_s"] >= 4
    assert run.lines[-1]["buffer/dropped_stale"] == 0
    run.process.send_signal(signal.SIGINT)
    run.end()


def test_a_run_without_daemons_is_reported_within_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["status", "zmq://127.0.0.1:9"]) == 1
    assert "! nothing listens at zmq://127.0.0.1:9" in capsys.readouterr().out
    monkeypatch.setattr("buffers.connect.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["status", f"zmq://127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert "! the buffer has not answered for 0.2 s" in capsys.readouterr().out
    assert main(["status", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_a_run_that_cannot_learn_is_told_so_with_a_remedy(
    launch: Callable[..., Launched], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "never.py").write_text("def score(episode):\n    return 0.0\n")
    settings = (f"data.reward={tmp_path}/never.py:score", "run.max_steps=8", "run.signs.steps=5")
    run = launch(*set_options(*settings))
    assert run.end() == 0
    said = "for 5 steps every reward is 0: compare answers with what is expected"
    assert run.log("learner").count(said) == 1
    assert main(["status", str(run.folder)]) == 0
    assert "learning for 8 steps every reward is 0: compare" in capsys.readouterr().out
    assert "for 8 steps every reward is 0" in " ".join(run.output.split())
