"""A run whose machine is lost goes on from `run.folder_mirror`, and each prompt is trained once."""

import contextlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl.checkpoints.find import list_checkpoints
from tests.settings import set_options
from tests.system.conftest import DEADLINE_S, Launched
from tests.system.test_launch import (
    assert_audit_passes,
    assert_books_close,
    assert_every_step_once,
)


def lose(run: Launched) -> None:
    """The machine with all processes and its disk."""
    launch = psutil.Process(run.process.pid)
    family = [launch, *launch.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.process.communicate()
    # What one was writing as it was killed is in the folder.
    assert not psutil.wait_procs(family, DEADLINE_S)[1]
    shutil.rmtree(run.folder)


def mirrored_steps(mirror: Path) -> list[int]:
    return [int(p.parent.name[5:]) for p in mirror.glob("run/checkpoints/step-*/manifest.json")]


@pytest.mark.parametrize("learner_dies_first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_lost_machine_costs_the_steps_since_the_last_mirrored_checkpoint(
    launch: Callable[..., Launched], tmp_path: Path, learner_dies_first: bool
):
    mirror = tmp_path / "mirror"
    settings = set_options(f"run.folder_mirror=file://{mirror}")
    run = launch(*settings, *set_options("run.max_steps=100000"), strict=False)
    if learner_dies_first:
        run.until_step(7)
        run.child("learner").send_signal(signal.SIGKILL)
    run.until(lambda: max(mirrored_steps(mirror), default=0) >= 9)
    lose(run)
    newest = max(mirrored_steps(mirror))

    num_steps = newest + 12
    run = launch(*settings, *set_options(f"run.max_steps={num_steps}"), "--resume")
    assert run.end() == 0, run.output
    assert f"fetching the run at step {newest} from file://{mirror}/run" in run.output
    assert_every_step_once(run, num_steps)
    assert_books_close(run)
    assert_audit_passes(run)
    assert f"file://{mirror}/run has the run's folder" in run.output
    there = {p.relative_to(mirror / "run") for p in (mirror / "run").rglob("*") if p.is_file()}
    for name in ("metrics.jsonl", "launch.json", "books.json", "report.html", "logs/learner.log"):
        assert (mirror / "run" / name).read_bytes() == (run.folder / name).read_bytes()
        assert Path(name) in there
    assert not [path for path in there if path.parts[0] in ("buffer", "weights", "keys")]
    kept = [int(path.name[5:]) for path in list_checkpoints(run.folder)]
    assert sorted(mirrored_steps(mirror)) == kept
    assert kept[-1] == num_steps
    trained = (mirror / "run" / "trained.jsonl").read_text().splitlines()
    prompts = [index for line in trained for index in json.loads(line)["prompt_indices"]]
    assert len(prompts) == len(set(prompts)) == num_steps * 4
