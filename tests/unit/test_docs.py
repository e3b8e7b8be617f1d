"""The documents agree with the code: generated pages, causes, presets, paths, examples of YAML."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from docs.generate import FOLDER, pages
from docs.reference import settings
from streamrl.config import RunConfig, load_config
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.losses import LOSS_SETTINGS
from streamrl.config.algorithm.rollout_is import ROLLOUT_IS_PRESETS
from streamrl.diagnosis.causes import CAUSES
from tests.documents import PAGES, ROOT, blocks

PATH = re.compile(r"`((?:streamrl|buffers|actors|learners|tests|configs|docs|deploy)/[\w./-]*)`")


@pytest.mark.parametrize("name", pages())
def test_a_generated_page_is_what_the_code_generates(name: str):
    assert (FOLDER / name).read_text(encoding="utf-8") == pages()[name], "run make docs"


def test_every_setting_stands_in_the_reference_with_a_meaning():
    text = pages()["configuration.md"]
    rows = [
        line.split(" | ") for line in re.findall(r"^\|(?: [\w, ]+ \|)? `.*$", text, re.MULTILINE)
    ]
    assert len(rows) >= len(list(settings(RunConfig)))
    nameless = [row[0] for row in rows if not row[-1].removesuffix("|").strip()]
    assert not nameless


def test_every_cause_of_the_diagnosis_has_a_remedy():
    text = (FOLDER / "troubleshooting.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#)", text, re.DOTALL | re.MULTILINE))
    assert list(entries) == list(CAUSES)
    for name, entry in entries.items():
        quoted = [line for line in entry.splitlines() if line.startswith("> ")]
        advice = [line for line in entry.splitlines() if line and not line.startswith(">")]
        assert quoted, name
        assert advice, name


def test_every_sentence_of_the_diagnosis_stands_in_the_entry_of_its_cause():
    text = (FOLDER / "troubleshooting.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#)", text, re.DOTALL | re.MULTILINE))
    missing = [
        f"{name}: {part}"
        for name, cause in CAUSES.items()
        for part in _sentence_parts(cause)
        if part not in entries[name]
    ]
    assert not missing


def _sentence_parts(cause: Callable[..., object]) -> list[str]:
    """The constant parts of the sentences that a cause yields; short ones are left out."""
    (function,) = ast.parse(inspect.getsource(cause)).body
    assert isinstance(function, ast.FunctionDef)
    strings = [
        node.value.strip(" ;,")
        for statement in function.body[bool(ast.get_docstring(function)) :]
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [string for string in strings if len(string) > 5]


def test_paths_that_the_documents_name_exist():
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in PATH.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_every_row_of_a_table_is_in_the_table():
    cut = re.compile(r"^\|.*\n\n(\|.*)\n(?!\|[ :-]*-)", re.MULTILINE)
    rows = [
        f"{page.relative_to(ROOT)}: {row}"
        for page in PAGES
        for row in cut.findall(page.read_text(encoding="utf-8"))
    ]
    assert not rows


def test_every_image_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    images = [path.name for path in (FOLDER / "images").iterdir()]
    assert [name for name in images if f"images/{name}" not in text] == []


def test_configurations_in_the_documents_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    whole = [b for b in blocks() if b.language == "yaml" and b.title]
    assert len(whole) >= 3
    for number, block in enumerate(whole):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.text, encoding="utf-8")
        load_config(path, environment={})


def test_settings_in_the_documents_can_be_loaded(tmp_path: Path):
    parts = [b for b in blocks() if b.language == "yaml" and not b.title]
    assert len(parts) >= 5
    for number, block in enumerate(parts):
        minimal = {"model": {"path": "model"}, "data": {"source": "copy"}}
        settings_shown = yaml.safe_load(block.text)
        whole = minimal | {
            n: {**minimal.get(n, {}), **v} if isinstance(v, dict) else v
            for n, v in settings_shown.items()
        }
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(whole), encoding="utf-8")
        load_config(path, environment={})


def test_every_preset_stands_in_the_table():
    text = (FOLDER / "importance-sampling.md").read_text(encoding="utf-8")
    missing = [name for name in ROLLOUT_IS_PRESETS if f"\n| `{name}` |" not in text]
    assert not missing


def test_every_objective_that_a_page_names_exists():
    text = (FOLDER / "objectives.md").read_text(encoding="utf-8")
    for choice, known in (("advantage", ADVANTAGE_SETTINGS), ("loss", LOSS_SETTINGS)):
        named = set(re.findall(rf"`{choice}: (\w+)`", text))
        assert named
        assert named <= known.keys()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
