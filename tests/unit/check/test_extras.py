"""Every extra of pyproject.toml: what needs its package is refused by `streamrl check`, as a launch
would refuse it, with the command that installs it."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from streamrl.extras import EXTRAS
from tests.documents import PAGES, ROOT

DECLARED: Mapping[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "vllm": ("generator.engine=vllm",),
    "sglang": ("generator.engine=sglang",),
    "redis": ("buffer.url=redis://127.0.0.1:1",),
    "s3": ("weights.store=s3://bucket/runs",),
    "gs": ("weights.store=gs://bucket/runs",),
    "wandb": ("tracking.wandb=offline",),
    "trackio": ("tracking.trackio=true",),
    "tensorboard": ("tracking.tensorboard=true",),
    "liger": ("learner.liger_layers=true",),
    "lora": ("learner.lora={}",),
    "gateway": ("generator.environment=agent", "data.chat_template=any.jinja"),
    "gym": ("generator.environment=frozen_lake",),
    "math": ("data.reward=math",),
    "mcp": (
        "generator.environment=tools",
        "data.chat_template=any.jinja",
        "generator.mcp_servers=[{command: [x]}]",
    ),
    "parquet": ("data.source=rows.parquet",),
    "datasets": ("data.source=datasets:name",),
    "textarena": ("generator.environment=textarena:Bandit-v0",),
    "vision": ("data.source=images.jsonl", "data.image_key=images"),
    "tasks": ("data.source=reasoning_gym:chain_sum",),
}
"""Settings of a run that need the packages of an extra."""
NOT_OF_A_RUN = {
    "flash": "nothing needs it",
    "gguf": "`streamrl get-model`, see test_without_its_packages_a_model_file_is_not_read",
    "ray": "`streamrl launch --ray`, see tests/unit/launchers/test_ray_bundles.py",
    "notebook": "`streamrl.train`, which refuses before it starts anything",
}
CONFIG = """
run: {name: run, folder: runs, max_steps: 2, evaluate: false}
model: {path: model, recipe: {}}
data: {source: copy, max_prompt_length: 16}
generator: {max_new_tokens: 16}
"""
WITHOUT = f"""
import json, sys
for module in {["antlr4", *(module for extra in EXTRAS.values() for module in extra.modules)]}:
    sys.modules[module] = None
from streamrl.cli.check.command import refusals, run_findings
from streamrl.config.loading.load import load_usable
cases = json.loads(sys.argv[1])
print(json.dumps({{
    extra: refusals(run_findings(*load_usable("run.yaml", settings)))
    for extra, settings in cases.items()
}}))
"""


def test_the_table_has_every_extra_with_modules_of_its_packages():
    assert set(EXTRAS) == set(DECLARED) - {"docs", "dev"}
    assert set(EXTRAS) == {*NEEDED_BY, *NOT_OF_A_RUN}
    installed = packages_distributions()
    for name, extra in EXTRAS.items():
        packages = {re.split(r"[\[<>=!~;]", line)[0].lower() for line in DECLARED[name]}
        packages |= {package.replace("-", "_") for package in packages}
        for module in extra.modules:
            known = {package.lower() for package in installed.get(module, ())}
            assert not known or known & packages, name


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """What `streamrl check` says by extra, in a process that has the packages of none."""
    folder: Path = tmp_path_factory.mktemp("without")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "rows.parquet").write_bytes(b"PAR1")
    image = {"prompt": "<image>c1=", "answer": "1", "images": ["image.png"]}
    (folder / "images.jsonl").write_text(json.dumps(image) + "\n")
    (folder / "image.png").write_bytes(b"\x89PNG")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(NEEDED_BY)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("extra", NEEDED_BY)
def test_check_names_the_setting_and_the_command(refused: Mapping[str, list[str]], extra: str):
    setting = re.split("[=:]", NEEDED_BY[extra][-1 if extra == "mcp" else 0])[0]
    command = f"pip install 'streamrl[{extra}]'"
    said = [sentence for sentence in refused[extra] if command in sentence]
    assert len(said) == 1, refused[extra]
    assert said[0].startswith(setting)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_name_the_command_and_not_the_extra(page: Path):
    named = re.findall(r"\(extras?:? `\w+`|\| extra `\w+`", page.read_text(encoding="utf-8"))
    assert not named
