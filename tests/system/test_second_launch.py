"""A launch beside one that is under way on the same run."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Launched, slow_reward
from tests.system.test_launch import _set, assert_audit_passes, assert_every_step_once

Launch = Callable[..., Launched]


@pytest.mark.long
def test_it_is_refused_and_the_first_goes_on(launch: Launch, tmp_path: Path):
    reward = f"data.reward={slow_reward(tmp_path, seconds=1.0)}"
    settings = _set("run.max_steps=8", reward)
    first = launch(*settings)
    first.until_step(1)
    for option in ("--new", "--resume"):
        second = launch(option, *settings)
        assert second.end() == 2
        assert second.output == (
            f"streamrl launch: run.name: process {first.process.pid} of {socket.gethostname()} is "
            f"a launch of {first.folder} already: stop it, or choose another run.name\n"
        )
    assert first.end() == 0, first.output
    assert_every_step_once(first, 8)
    assert_audit_passes(first)
