"""A password is read from where it is kept, and stands in nothing that is printed or written."""

import argparse
import os
import sys
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config import RunConfig, load_config, render, to_yaml
from streamrl.config.loading.load import configuration
from streamrl.config.secrets import REDIS_PASSWORD, hide_password
from streamrl.errors import ConfigError
from streamrl.run_folder import prepare

MINIMAL = "model: {path: some-model}\ndata: {source: addition}\n"
URL = "redis://user:s3cret@127.0.0.1:1/0"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(REDIS_PASSWORD, raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def load(file: Path, *overrides: str) -> RunConfig:
    return load_config(file, overrides, {}).config


@pytest.mark.parametrize(
    ("url", "hidden", "password"),
    [
        ("redis://:pw@host:1/0", "redis://:***@host:1/0", "pw"),
        ("redis://user:p%40w@host", "redis://user:***@host", "p@w"),
        ("redis://user:p@w:x@host", "redis://user:***@host", "p@w:x"),
        ("redis+cluster://u:pw@a:1,b:2", "redis+cluster://u:***@a:1,b:2", "pw"),
        ("buffer.url=redis://:pw@host", "buffer.url=redis://:***@host", "pw"),
        ("redis://user@host:6379/0?x=a@b", "redis://user@host:6379/0?x=a@b", ""),
        ("redis://:***@host", "redis://:***@host", ""),
        ("run.seed=1", "run.seed=1", ""),
    ],
)
def test_a_password_is_taken_out_of_a_url(url, hidden, password):
    assert hide_password(url) == (hidden, password)


def test_what_is_written_and_printed_has_no_password(file):
    loaded = load_config(file, [f"buffer.url={URL}", f"run.folder={file.parent}"], {})
    config = prepare(loaded.config, resume=False, new=False)
    texts = [render(loaded), to_yaml(config), repr(config), str(config.model_dump())]
    texts += [(config.run.path / "config.yaml").read_text(), config.model_dump_json()]
    assert not any("s3cret" in text for text in texts)
    assert config.buffer.url == "redis://user:***@127.0.0.1:1/0"
    assert config.buffer.secret_url == URL


def test_the_password_outlives_a_copy_of_the_settings(file):
    buffer = load(file, f"buffer.url={URL}").buffer.model_copy(update={"deadline_s": 1.0})
    assert buffer.secret_url == URL


def test_the_url_wins_over_the_environment_over_the_file(file, monkeypatch):
    (file.parent / "password").write_text("of-file\n")
    bare, given = "buffer.url=redis://user@host", f"buffer.url={URL}"
    settings = f"buffer.password_file={file.parent / 'password'}"
    assert load(file, bare, settings).buffer.secret_url == "redis://user:of-file@host"
    monkeypatch.setenv(REDIS_PASSWORD, "of the/environment")
    assert load(file, bare, settings).buffer.password == "of the/environment"
    assert load(file, bare).buffer.secret_url == "redis://user:of%20the%2Fenvironment@host"
    assert load(file, given, settings).buffer.password == "s3cret"


def test_a_server_without_a_password_needs_none(file):
    assert load(file, "buffer.url=redis://host").buffer.secret_url == "redis://host"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["buffer.url=redis://:***@host"], "was written without its password: give it in the"),
        (["buffer.password_file=nowhere"], "buffer.password_file: cannot read nowhere: No such"),
        (["buffer.password_file=/dev/null"], "buffer.password_file: /dev/null is empty"),
    ],
)
def test_a_password_that_is_not_there_is_named(file, settings, sentence):
    buffer = load(file, "buffer.url=redis://host", *settings).buffer
    with pytest.raises(ConfigError, match=sentence):
        _ = buffer.secret_url


@pytest.mark.usefixtures("torch_is_known")
@pytest.mark.parametrize(
    "override",
    [
        "buffer.url=redsi://:s3cret@host",
        "buffer.url=redis:/:s3cret@host",
        "buffer.url=redis://:s3cret@host:99999",
        "buffer.url=redis://:s3?cret@host",
        "buffer.url=redis://host?password=s3cret",
        "buffer.url=zmq://me:s3cret@0.0.0.0:1",
        "buffer=redis://:s3cret@host",
        "buffer.url.host=redis://:s3cret@host",
        "buffer.ulr=redis://:s3cret@host",
        "buffer.url={redis://:s3cret@host",
        "redis://:s3cret@host",
        "generator.vllm.url=http://me:s3cret@host",
    ],
)
def test_a_refusal_shows_no_password(file, capsys, override):
    assert main(["check", str(file), "--set", override]) == 2
    assert "cret" not in "".join(capsys.readouterr())


def test_a_file_that_is_no_yaml_is_refused_without_its_lines(file, capsys):
    file.write_text(MINIMAL + "buffer: {url: redis://:s3: cret@host\n")
    assert main(["check", str(file)]) == 2
    assert "cret" not in "".join(capsys.readouterr())


def test_processes_that_are_started_get_it_in_the_environment_alone(file, monkeypatch):
    given = [f"buffer.url={URL}", "run.seed=1"]
    monkeypatch.setattr(sys, "argv", ["streamrl", "launch", "--set", given[0]])
    # Set by the command, so that it is undone after the test.
    monkeypatch.setenv(REDIS_PASSWORD, "older")
    arguments = argparse.Namespace(file=str(file), config=None, overrides=list(given))
    loaded = configuration(arguments)
    assert os.environ[REDIS_PASSWORD] == loaded.config.buffer.password == "s3cret"
    hidden = "buffer.url=redis://user:***@127.0.0.1:1/0"
    assert arguments.overrides == [hidden, "run.seed=1"]
    assert sys.argv == ["streamrl", "launch", "--set", hidden]
    assert load_config(file, arguments.overrides).config.buffer.secret_url == URL
