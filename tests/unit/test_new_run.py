"""A run begins anew on a buffer that knows it only where a person has said so."""

import os
import time
from pathlib import Path

import pytest

from streamrl.checkpoints.find import path_of, require_new_run
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.run_folder import move_aside
from streamrl.types import Books
from tests.checkpoints import write_checkpoint


def configure(folder: Path, url: str = "zmq://127.0.0.1:29600") -> RunConfig:
    file = folder / "run.yaml"
    file.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    config = load_config(
        file, [f"run.folder={folder}", "run.name=run", f"buffer.url={url}"], {}
    ).config
    config.run.path.mkdir(exist_ok=True)
    return config


def refusal(config: RunConfig, policy_version: int = 7) -> str:
    with pytest.raises(ConfigError) as refused:
        require_new_run(config, 1, policy_version)
    return str(refused.value)


def test_runs_that_are_moved_aside_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    run = tmp_path / "run"
    for number in range(3):
        run.mkdir()
        (run / f"metrics-{number}").touch()
        move_aside(run)
    found = {path.name: os.listdir(path) for path in tmp_path.iterdir()}
    assert found == {
        "run.20260101-000000": ["metrics-0"],
        "run.20260101-000000-2": ["metrics-1"],
        "run.20260101-000000-3": ["metrics-2"],
    }


def test_a_buffer_that_no_learner_has_attached_takes_a_new_run(tmp_path):
    require_new_run(configure(tmp_path), 0, 0)


def test_the_choice_is_named_with_the_checkpoint_that_resume_takes(tmp_path):
    config = configure(tmp_path)
    run = config.run.path
    for version in (4, 6):
        write_checkpoint(run, version, Books())
    assert refusal(config) == (
        "run.name: the buffer holds a run run at version 7 already: --resume goes on from its "
        f"newest checkpoint, {path_of(run, 6)}. To start anew, stop the buffer and move {run} "
        "aside, as launch --new does, or choose another run.name"
    )
    (path_of(run, 6) / "state.json").unlink()
    assert f"goes on from its newest checkpoint, {path_of(run, 4)}. " in refusal(config)
    (path_of(run, 4) / "state.json").unlink()
    assert "from the checkpoint that run.resume has to name, since none is complete" in refusal(
        config
    )


def test_without_a_checkpoint_resume_begins_again_and_loses_nothing(tmp_path):
    config = configure(tmp_path)
    # A learner that died before its first step has attached all the same.
    assert (
        f"at version 0 already: --resume goes on at version 0, since {config.run.path} has no "
        "checkpoint; the run's prompts are trained again, and none is lost"
    ) in refusal(config, policy_version=0)


def test_a_server_that_outlives_its_runs_is_told_to_delete_one(tmp_path):
    config = configure(tmp_path, "redis://127.0.0.1:1/0")
    assert (
        "To start anew, delete it there with launch --new or streamrl buffer books --forget"
        in refusal(config)
    )
