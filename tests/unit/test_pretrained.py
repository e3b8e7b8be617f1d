"""A model's folder that lacks weights, or whose weights are others or damaged, is refused."""

import json
from pathlib import Path

import pytest
import torch

from actors.engines.hf.engine import load_model
from learners.policy.loading import load_network
from streamrl.errors import ConfigError
from streamrl.vision.families import load_pretrained
from tests.tiny_model import save_llama
from tests.training import make_config


def with_config(folder: Path, **changes: int) -> Path:
    save_llama(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def cut(folder: Path) -> Path:
    save_llama(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    return folder


@pytest.mark.parametrize("load", [load_model, load_network], ids=["engine", "learner"])
def test_a_run_with_half_a_model_is_refused(tmp_path, load):
    folder = with_config(tmp_path / "model", num_hidden_layers=9)
    with pytest.raises(ConfigError, match=r"model\.path: .* lacks weights .*, and \d+ more"):
        load(make_config(model={"path": str(folder)}))


def test_weights_of_another_shape_are_named(tmp_path):
    folder = with_config(tmp_path / "model", vocab_size=77)
    with pytest.raises(ConfigError, match=r"model\.path: .*weight of .* has the shape .*77"):
        load_pretrained(str(folder), dtype=torch.float32, trust_remote_code=False)


def test_weights_that_are_cut_off_are_damaged(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: the weights of .* are damaged"):
        load_pretrained(str(cut(tmp_path / "model")), dtype=torch.float32, trust_remote_code=False)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_whole_model_is_loaded(tmp_path, is_tied):
    save_llama(tmp_path / "model", tie_word_embeddings=is_tied)
    path = str(tmp_path / "model")
    model = load_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
