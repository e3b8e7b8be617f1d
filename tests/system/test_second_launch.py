"""A launch beside one that is under way on the same run."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Launched
from tests.system.test_launch import _set, assert_audit_passes, assert_every_step_once

Launch = Callable[..., Launched]

REWARD = """
import time
from pathlib import Path

def score(episodes):
    time.sleep(1)
    while Path({held!r}).exists():
        time.sleep(0.05)
    return [1.0 for _ in episodes]
"""


@pytest.mark.long
def test_it_is_refused_and_the_first_goes_on(launch: Launch, tmp_path: Path):
    held, reward = tmp_path / "held", tmp_path / "reward.py"
    reward.write_text(REWARD.format(held=str(held)))
    settings = _set("run.max_steps=8", f"data.reward={reward}:score")
    first = launch(*settings)
    first.until_step(1)
    # However long the others take to start, the first one is under way.
    held.touch()
    for option in ("--new", "--resume"):
        second = launch(option, *settings)
        assert second.end() == 2
        assert second.output == (
            f"streamrl launch: run.name: process {first.process.pid} of {socket.gethostname()} is "
            f"a launch of {first.folder} already: stop it, or choose another run.name\n"
        )
    held.unlink()
    assert first.end() == 0, first.output
    assert_every_step_once(first, 8)
    assert_audit_passes(first)
