"""deploy/sky.yaml, read by SkyPilot itself; its commands are the shell's and ours."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import kept_environment
from tests.documents import ROOT

SKYPILOT = "skypilot>=0.14,<0.15"
FILE = ROOT / "deploy" / "sky.yaml"


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `sky jobs launch` would read it."""
    folder = tmp_path_factory.mktemp("sky")
    python = kept_environment("sky", SKYPILOT) / "bin" / "python"
    read = subprocess.run(
        [python, Path(__file__).with_name("parse_sky.py"), FILE],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
    )
    line = next(line for line in read.stdout.splitlines() if line.startswith("parsed: "))
    shown: dict[str, Any] = json.loads(line.removeprefix("parsed: "))
    return shown


def test_skypilot_reads_a_job_group_that_ends_with_its_learner(parsed: dict[str, Any]):
    assert parsed["is_job_group"] is True
    assert parsed["primary_tasks"] == ["learner"]
    assert set(parsed["tasks"]) == {"learner", "generators"}


def test_generators_are_on_spot_nodes_that_are_recovered(parsed: dict[str, Any]):
    learner, generators = parsed["tasks"]["learner"], parsed["tasks"]["generators"]
    (spot,) = generators["resources"]
    (on_demand,) = learner["resources"]
    assert (spot["use_spot"], on_demand["use_spot"]) == (True, False)
    assert generators["num_nodes"] > 1
    # What `docs/operating.md` says a restart may change.
    assert on_demand["job_recovery"]["recover_on_exit_codes"] == [1, 4, 5]
    assert spot["job_recovery"]["max_restarts_on_errors"] == 100


def test_the_commands_are_a_shell_s(parsed: dict[str, Any]):
    for task in parsed["tasks"].values():
        done = subprocess.run(["bash", "-n"], input=task["run"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "ray start" in task["run"]
