"""The fuzzer of settings with a small budget; by hand it takes any (`tests.fuzz`)."""

import json
import subprocess
import sys

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError
from tests.fuzz.settings import ALWAYS, SOURCE, VALUES

DEADLINE_S = 240.0


@pytest.mark.long
def test_runs_of_random_settings_train():
    command = [sys.executable, "-m", "tests.fuzz.settings", "--runs", "6", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"trained": 6}


def refusal(override: str) -> str:
    """What the configuration says of it alone; empty if it is accepted."""
    try:
        load_config(SOURCE, [*ALWAYS, override])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", VALUES)
def test_what_is_drawn_is_known(name: str):
    for value in VALUES[name]:
        said = refusal(f"{name}={value}")
        assert "unknown key; allowed" not in said
        assert "is unknown" not in said
