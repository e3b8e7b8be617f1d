"""A run begins anew on a buffer that knows it only where a person has said so."""

import os
import time
from pathlib import Path

import pytest

from streamrl.checkpoints.find import require_new_run
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.run_folder import move_aside


def configure(folder: Path, url: str = "zmq://127.0.0.1:29600") -> RunConfig:
    file = folder / "run.yaml"
    file.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    config = load_config(
        file, [f"run.folder={folder}", "run.name=run", f"buffer.url={url}"], {}
    ).config
    config.run.path.mkdir(exist_ok=True)
    return config


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        require_new_run(config, 1, 7)
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


def test_the_choice_is_named(tmp_path):
    config = configure(tmp_path)
    assert refusal(config) == (
        "run.name: the buffer holds a run run at version 7 already: go on with --resume, or, to "
        f"start anew, stop the buffer and move {config.run.path} aside, as launch --new does, or "
        "choose another run.name"
    )


def test_a_server_that_outlives_its_runs_is_told_to_delete_one(tmp_path):
    config = configure(tmp_path, "redis://127.0.0.1:1/0")
    assert (
        "to start anew, delete it there with launch --new or streamrl buffer books --forget"
        in refusal(config)
    )
