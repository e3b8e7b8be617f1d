"""`configs/recipes/colors`: its prompts, the model that it makes, and what is refused of such a
maker."""

import logging
from pathlib import Path

import pytest

from actors.make_model import make_model
from actors.prompts import open_held_out, open_prompts
from actors.rendering.renderer import ChatRenderer, load_media
from streamrl.cli.main import main
from streamrl.config import RunConfig, load_config
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError
from streamrl.vision.families import load_pretrained
from tests.tiny_vision import COLORS


def config(monkeypatch: pytest.MonkeyPatch, *settings: str) -> RunConfig:
    monkeypatch.chdir(COLORS)
    return load_config(Path("config.yaml"), settings, environment={}).config


def test_its_prompts_are_a_function_of_seed_and_index_and_hold_out_their_own(monkeypatch):
    data = config(monkeypatch, "data.num_eval_prompts=20").data
    first, second = open_prompts(data, seed=3), open_prompts(data, seed=3)
    assert [first[i] for i in range(20)] == [second[i] for i in range(20)]
    assert first[0] != open_prompts(data, seed=4)[0]
    assert {first[i].answer for i in range(200)} == set("rgbywk")
    held_out = {repr(prompt.content) for prompt in open_held_out(data)}
    assert len(held_out) == 20
    assert not held_out & {repr(first[i].content) for i in range(200)}


def test_its_model_is_made_and_reads_an_image(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "actors.make_model")
    short = ("model.recipe.batch_size=4", "model.recipe.warm_start_steps=5")
    made = config(monkeypatch, f"model.path={tmp_path / 'model'}", *short)
    make_model(made)
    assert "a qwen2_5_vl of 0.16 M parameters" in caplog.messages
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model = load_pretrained(made.model.path, dtype="float32", trust_remote_code=False)
    renderer = ChatRenderer.from_config(made)
    prompt = load_media(open_prompts(made.data, seed=0)[0])
    token_ids = renderer.encode(prompt)
    assert model.config.image_token_id in token_ids
    assert len(renderer.media_of(prompt)) == 1
    assert renderer.decode(token_ids).endswith("?")


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("Llama", "was 'Llama'; it must be llama or code of your own, PATH.py:NAME"),
        ("maker.py:rite", r"model.recipe.architecture: maker.py has no function 'rite'; .*'write'"),
        ("maker.py:write", r"model.recipe.architecture: maker.py:write: OSError: full \(maker.py:"),
        ("maker.py:nothing", r"maker.py:nothing wrote no model"),
    ],
)
def test_a_maker_that_makes_nothing_is_refused(monkeypatch, tmp_path, architecture, sentence):
    source = (
        "def write(folder, recipe, max_model_len):\n    raise OSError('full')\n\n\n"
        "def nothing(folder, recipe, max_model_len):\n    pass\n"
    )
    (tmp_path / "maker.py").write_text(source)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: made, recipe: {{architecture: {architecture}}}}}\ndata: {{source: copy}}\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        make_model(load_config("run.yaml", environment={}).config)
    assert not list(Path().glob("made*"))


def test_a_check_finds_that_there_is_no_such_maker_without_running_the_file(
    monkeypatch, tmp_path, capsys
):
    (tmp_path / "maker.py").write_text("raise SystemExit('was run')\n\n\ndef write(): ...\n")
    (tmp_path / "run.yaml").write_text(
        "model: {path: made, recipe: {architecture: maker.py:rite}}\ndata: {source: copy}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["check", "run.yaml"]) == 2
    error = capsys.readouterr().err
    assert "model.recipe.architecture: maker.py has no function 'rite'" in error
    assert "was run" not in error


def test_what_the_recipe_has_now_is_named_where_it_was(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m, recipe: {vision: true}}\ndata: {source: copy}\n")
    with pytest.raises(ConfigError, match=r"^model\.recipe\.vision: .*the recipe colors"):
        load_config(file, environment={})
    with pytest.raises(ConfigError, match=r"^data\.source: was 'colors'; .*--recipe colors"):
        open_prompts(DataSettings(source="colors"), seed=0)
