"""The fuzzer of settings with a small budget; by hand it takes any (`tests.fuzz`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config import load_config
from streamrl.config.loading.rendering import to_yaml
from streamrl.errors import ConfigError
from tests.fuzz.settings import ALWAYS, SOURCE, VALUES

DEADLINE_S = 540.0


@pytest.mark.long
def test_runs_of_random_settings_train():
    command = [sys.executable, "-m", "tests.fuzz.settings", "--runs", "6", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"trained": 6}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_drawn_is_known_and_what_is_accepted_is_read_back(name: str, tmp_path: Path):
    file = tmp_path / "config.yaml"
    for value in VALUES[name]:
        try:
            config = load_config(SOURCE, [*ALWAYS, f"{name}={value}"]).config
        except ConfigError as error:
            refusal = str(error)
        else:
            refusal = ""
        assert "unknown key; allowed" not in refusal
        assert "is unknown" not in refusal
        if refusal:
            continue
        # As the daemons of a run read what its launch has written.
        file.write_text(to_yaml(config))
        assert load_config(str(file)).config == config, value
