"""`streamrl new` and the recipes that it copies."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from actors.prompts import open_held_out
from streamrl.cli.check.data import check_overlap
from streamrl.cli.main import main
from streamrl.cli.new import recipes
from streamrl.config import load_config
from streamrl.user_code import is_user_code

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_complete_where_it_is_copied_to(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--recipe", name]) == 0
    assert capsys.readouterr().out == (ROOT / f"configs/recipes/{name}/README.md").read_text()
    monkeypatch.chdir(tmp_path / "mine")
    assert load_config("config.yaml", environment={}).config.run.name


@pytest.mark.parametrize("name", recipes())
def test_what_a_recipe_holds_out_is_never_trained(name, monkeypatch):
    monkeypatch.chdir(ROOT / "configs" / "recipes" / name)
    data = load_config("config.yaml", environment={}).config.data
    if not all(is_user_code(source.path) for source in data.eval_sources):
        pytest.skip("made up by a task, whose seeds are tested, or downloaded")
    prompts = open_held_out(data)
    held_out = tuple(map(prompts.__getitem__, range(len(prompts))))
    assert held_out or not data.eval_sources
    assert list(check_overlap(data, held_out)) == []


def test_what_cannot_be_copied_says_why(tmp_path, capsys):
    assert main(["new", str(tmp_path), "--recipe", "own_reward"]) == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "a"), "--recipe", "own_rewards"]) == 2
    assert "--recipe: was 'own_rewards'; did you mean 'own_reward'" in capsys.readouterr().err
    assert main(["new"]) == 2
    assert "own_reward" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_wheel_holds_the_recipes_and_the_documents_and_says_that_it_is_typed(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env=os.environ)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in ("streamrl", "actors", "learners", "buffers")} <= (
        names
    )
    # Where the page of a run leads.
    assert {f"streamrl/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= names
    for name, folder in recipes().items():
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"streamrl/recipes/{name}/{file.relative_to(folder)}" in names
