"""`streamrl get-model`: what it takes, what it refuses, and that nothing half made is left."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.cli import get_model
from streamrl.cli.main import main
from streamrl.config import RunConfig
from tests.standins.hub import Hub
from tests.unit.recipes.tiny_gguf import CHAT_TEMPLATE, write_gguf

DEADLINE_S = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def left() -> list[str]:
    return sorted(path.name for path in Path("models").iterdir())


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("smolm2-135m", "known model 'smolm2-135m'; did you mean 'smollm2-135m'?"),
        ("nowhere/model.gguf", "there is no file, folder or known model 'nowhere/model.gguf'"),
        ("a/b/c", "there is no file, folder or known model 'a/b/c'"),
        ("empty", "empty has no config.json, so it must have one GGUF file; it has none"),
        ("two", "it must have one GGUF file; it has a.gguf, b.gguf"),
        ("bare", "it has no config.json or no weights"),
        ("broken.gguf", "broken.gguf cannot be read"),
    ],
)
def test_what_is_no_model_is_refused_and_leaves_nothing(folder, capsys, model, sentence):
    Path("empty").mkdir()
    Path("two").mkdir()
    Path("two/a.gguf").touch()
    Path("two/b.gguf").touch()
    Path("bare").mkdir()
    Path("bare/config.json").write_text("{}")
    Path("broken.gguf").write_bytes(b"GGUF, but not one")
    assert main(["get-model", model]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("models").exists() or left() == []


def test_a_folder_is_copied_and_one_that_exists_is_left_as_it_is(folder, capsys):
    source = write_model(folder / "tiny")
    assert main(["get-model", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("models/tiny: llama, 0.0 M parameters, without a")
    (source / "config.json").write_text("{}")
    assert main(["get-model", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("models/tiny exists already: llama")
    assert "llama" in Path("models/tiny/config.json").read_text()
    assert left() == ["tiny"]


@pytest.mark.parametrize("model", ["tiny.gguf", "files"])
def test_gguf_becomes_a_folder_that_computes_the_same(folder, capsys, model):
    Path("files").mkdir()
    written = write_gguf(Path("files/tiny.gguf"))
    Path("tiny.gguf").symlink_to("files/tiny.gguf")
    assert main(["get-model", model, "--output", "made"]) == 0
    assert "with a chat template" in capsys.readouterr().out
    made = AutoModelForCausalLM.from_pretrained("made", dtype=torch.float32)
    ids = torch.arange(3, 11)[None]
    torch.testing.assert_close(made(ids).logits, written(ids).logits, rtol=1e-4, atol=1e-5)
    assert "lm_head.weight" not in load_file("made/model.safetensors")
    assert AutoTokenizer.from_pretrained("made").chat_template == CHAT_TEMPLATE


def test_the_model_of_a_configuration_is_made_where_there_is_none(folder, capsys):
    Path("run.yaml").write_text(
        "model: {path: made, recipe: {hidden_size: 8, intermediate_size: 8, num_layers: 1}}\n"
        "data: {source: copy, source_kwargs: {max_length: 3}}\n"
    )
    command = ["get-model", "--config", "run.yaml", "--set", "model.recipe.warm_start_steps=0"]
    assert main(command) == 0
    assert AutoModelForCausalLM.from_pretrained("made").config.hidden_size == 8
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("made exists already\n")
    elsewhere = ["--set", "model.path=other", "--set", "data={source: environment}"]
    assert main([*command, *elsewhere]) == 0
    assert AutoModelForCausalLM.from_pretrained("other").config.hidden_size == 8
    assert main([*command, *elsewhere, "--set", "model.recipe.warm_start_steps=1"]) == 0
    elsewhere[1] = "model.path=third"
    assert main([*command, *elsewhere, "--set", "model.recipe.warm_start_steps=1"]) == 2
    assert "prompts without a text or an answer cannot be taught" in capsys.readouterr().err
    assert not Path("third").exists()


def test_of_runs_that_begin_together_one_makes_the_model_and_the_others_wait(folder, monkeypatch):
    model = "{path: models/m, recipe: {hidden_size: 8, intermediate_size: 8, num_layers: 1}}"
    Path("run.yaml").write_text(f"model: {model}\ndata: {{source: addition}}\n")
    made = []

    def make(config: RunConfig) -> None:
        made.append(config.model.path)
        time.sleep(0.2)
        Path(config.model.path).mkdir()

    monkeypatch.setattr("actors.make_model.make_model", make)
    given = argparse.Namespace(model=None, config="run.yaml", overrides=[], output=None)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(get_model.main, [given] * 3)) == [0, 0, 0]
    assert made == ["models/m"]
    assert left() == [".m.lock", "m"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "give MODEL, or --config CONFIG"),
        (("--config", "run.yaml", "--output", "here"), "is made at its model.path"),
        (("tiny", "--set", "run.seed=1"), "MODEL: is got as it is; --config and --set go without"),
        (("--config", "run.yaml"), "model.path: there is no made, and no model.recipe"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, capsys, words, sentence):
    Path("run.yaml").write_text("model: {path: made}\ndata: {source: copy}\n")
    assert main(["get-model", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_make_model_says_where_it_went(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["make-model", "run.yaml"])
    assert ended.value.code == 2
    assert "it is `streamrl get-model --config CONFIG`" in capsys.readouterr().err


@pytest.mark.usefixtures("torch_is_known")
def test_a_run_without_its_model_is_told_how_to_get_it(folder, capsys):
    assert main(["new", "sums", "--recipe", "sums"]) == 0
    os.chdir("sums")
    assert main(["check", "config.yaml"]) == 2
    remedy = "`streamrl get-model smollm2-135m --output models/smollm2-135m` writes it"
    assert f"there is no folder models/smollm2-135m; {remedy}" in capsys.readouterr().err


def get_from_hub(hub: Hub, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf")}
    command = [sys.executable, "-m", "streamrl.cli.main", "get-model", "owner/tiny"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)


def test_a_killed_download_leaves_no_model_and_the_next_one_makes_it(folder):
    source = write_model(folder / "source")
    with Hub({"owner/tiny": source}) as hub:
        hub.stop_within("model.safetensors")
        download = get_from_hub(hub, folder)
        assert hub.stopped.wait(DEADLINE_S)
        download.send_signal(signal.SIGKILL)
        download.communicate(timeout=DEADLINE_S)
        assert left() == [".tiny.unfinished"]
        hub.go_on()
        again = get_from_hub(hub, folder)
        output, errors = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, errors
    assert output.startswith("models/tiny: llama")
    assert left() == ["tiny"]
    names = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in Path("models/tiny").iterdir()) == names


def test_a_name_that_the_hub_does_not_have_and_a_hub_that_is_away(folder):
    with Hub({}) as hub:
        unknown = get_from_hub(hub, folder)
        errors = unknown.communicate(timeout=DEADLINE_S)[1]
    assert unknown.returncode == 2
    assert "the hub does not give 'owner/tiny'" in errors
    away = get_from_hub(hub, folder)
    errors = away.communicate(timeout=DEADLINE_S)[1]
    assert away.returncode == 5
    assert "the hub does not answer" in errors
    assert left() == []
