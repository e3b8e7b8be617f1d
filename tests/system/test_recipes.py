"""The recipes with a pretrained model, for some steps, with the model from the package registry."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.cli.check.machine import read_machine
from streamrl.config import load_config
from streamrl.errors import EXIT_UNREACHABLE
from tests.documents import ROOT
from tests.system.conftest import STREAMRL

# To make the model takes as long as to train it: once, in one process of the tests.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("recipes"),
]
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model in models/."""
    folder = tmp_path_factory.mktemp("recipes")
    command = [STREAMRL, "get-model", "smollm2-135m"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode == EXIT_UNREACHABLE:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


def test_the_model_of_the_package_answers(folder: Path):
    path = folder / "models/smollm2-135m"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answered = model.generate(**asked, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answered[0, asked["input_ids"].shape[1] :])


def test_a_recipe_trains_the_model(folder: Path):
    name = "chain_sum"
    settings = {
        "run.max_steps": STEPS,
        "data.num_eval_prompts": 4,
        "buffer.url": "zmq://127.0.0.1:0",
        "weights.address": "tcp://127.0.0.1:0",
        "learner.groups_per_step": 2,
        "learner.optimizer.warmup_steps": 0,
    }
    given = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "deploy/recipe.py", name, "--seed", "7", "--folder", str(folder)]
    done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["recipe"], line["seed"], line["steps"]) == (name, 7, STEPS)
    assert all(0 <= share <= 1 for share in (*line["reward/exact"], line["held_out"]))
    assert line["peak_mib"] > 1000
    config = load_config(str(folder / f"runs/{name}-7/config.yaml"), environment={}).config
    dtype = "float32" if read_machine().lacks_bfloat16 else "bfloat16"
    assert (config.learner.dtype, config.generator.dtype) == (dtype, dtype)
