"""What the supervisor of a node gives the commands that it starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import asyncio, os, sys
from pathlib import Path
from streamrl.cli.launchers.ray import supervisor

os.nice(4)
supervisor._start_watcher = lambda mark: -1

async def run():
    one = supervisor.Supervisor()
    one._folder, one._directory = Path(sys.argv[1]), Path(sys.argv[1])
    code = "import time, os; time.sleep(0.5); print(os.nice(0))"
    return await one.run("learner", [sys.executable, "-c", code], {}, "text")

assert asyncio.run(run()) == (0, None)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to raise a priority")
def test_a_command_is_as_urgent_as_ray_although_rays_workers_are_not(tmp_path: Path):
    subprocess.run([sys.executable, "-c", WORKER, str(tmp_path)], check=True, timeout=300)
    assert int((tmp_path / "logs" / "learner.log").read_text()) == os.nice(0)


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        ("ModuleNotFoundError: No module named 'streamrl'", "has no StreamRL .* which every node"),
        ("Can't get attribute 'Supervisor.fetch' on <module", "has StreamRL .* not the code of"),
        ("CUDA error", None),
    ],
)
def test_what_keeps_a_supervisor_from_starting_is_said(cause: str, sentence: str | None):
    cluster = pytest.importorskip("streamrl.cli.launchers.ray.cluster")
    refusal = cluster._import_refusal(f"ray::Supervisor.__init__() (pid=1, ip=10.0.0.1, x) {cause}")
    assert refusal is None if sentence is None else re.search(f"10.0.0.1: {sentence}", refusal)
