"""`streamrl status` of a run that works, of one whose generator froze, and of one that is over."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.system.conftest import STREAMRL, Launched
from tests.system.test_launch import _set

REWARD = """
import time

def score(episodes):
    time.sleep(1.5)
    return [1.0 for _ in episodes]
"""


def status(target: Path | str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [STREAMRL, "status", str(target), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def causes(target: Path) -> dict[str, str]:
    found = json.loads(status(target, "--json").stdout)["findings"]
    return {finding["cause"]: finding["sentence"] for finding in found}


def reports(run: Launched) -> list[dict[str, Any]]:
    told = json.loads(status(run.folder, "--json").stdout)
    return told["buffer"]["generators"] if told["buffer"] else []


def test_a_frozen_generator_is_named_by_the_learner_and_by_status(
    launch: Callable[..., Launched], tmp_path: Path
):
    """Its reward lasts longer than a heartbeat, so that it is frozen with leases it has told of."""
    (tmp_path / "slow.py").write_text(REWARD)
    settings = (
        f"data.reward={tmp_path / 'slow.py'}:score",
        "generator.count=1",
        "buffer.max_staleness=0",
        "buffer.lease_ttl_s=60",
        "run.stall_s=3",
        "run.max_steps=1000",
    )
    run = launch(*_set(*settings))
    run.until_step(1)
    done = status(run.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "healthy" in done.stdout
    assert "step" in done.stdout
    generator = run.child("generator-0")

    def frozen_with_leases() -> bool:
        generator.send_signal(signal.SIGSTOP)
        if any(report["lease_ids"] for report in reports(run)):
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
    done = status(run.folder)
    assert done.returncode == 1
    assert "! " in done.stdout.splitlines()[1]
    generator.send_signal(signal.SIGCONT)
    step = len(run.lines)
    run.until_step(step + 1)
    run.until(lambda: "goes on after" in run.log("learner"))
    assert run.lines[-1]["learner/stalls"] >= 1
    run.until(lambda: status(run.folder).returncode == 0)
    run.process.send_signal(signal.SIGINT)
    run.end()
    done = status(run.folder)
    assert done.returncode == 0, done.stdout
    assert "has ended" in done.stdout


def test_a_run_that_nobody_serves_is_told_within_seconds(tmp_path: Path):
    done = status("zmq://127.0.0.1:9")
    assert done.returncode == 1
    assert "the buffer has not answered for 5 s" in done.stdout
    done = status(tmp_path)
    assert done.returncode == 2
    assert "no run folder" in done.stderr
