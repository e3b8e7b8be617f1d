"""A live run in `streamrl status --follow`, and its logs as JSON while a generator is killed."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.settings import set_options
from tests.system.conftest import STREAMRL, Launched, slow_reward
from tests.terminal import Terminal, is_put_back


@pytest.mark.long
def test_a_live_run_is_followed_to_its_end_and_every_line_of_its_logs_is_json(
    launch: Callable[..., Launched], tmp_path: Path
):
    settings = ("run.log_format=json", "run.max_steps=100000")
    reward = f"data.reward={slow_reward(tmp_path, seconds=0.3)}"
    run = launch(*set_options(*settings, reward), strict=False)
    run.until_step(5)
    screen = Terminal([STREAMRL, "status", str(run.folder), "--follow"], rows=60, columns=150)
    try:
        screen.until(lambda text: "generator-0" in text and "s a step: " in text)
        run.child("generator-0").send_signal(signal.SIGKILL)
        run.until(lambda: "was killed by SIGKILL" in run.log("generator-0"))
        run.until_step(len(run.lines) + 6)
        run.until(lambda: run.lines[-1].get("scaling/steps_per_s") is not None)
        assert run.lines[-1]["generator/idle_frac"] > 0
        # Which of them it is depends on the machine.
        hints = ("limits the run", "limit the run", "keep up", "take turns")
        screen.until(lambda text: any(hint in text for hint in hints))
        run.process.send_signal(signal.SIGINT)
        run.end()
        screen.until(lambda text: "stopped at step" in text)
        assert screen.end() == 0
        assert is_put_back(screen.output)
    finally:
        screen.kill()
    for log in (run.folder / "logs").glob("*.log"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert {line["role"] for line in lines} == {log.stem}
        assert all(line["time"] and line["pid"] and line["message"] for line in lines)
