"""A model's folder that lacks weights, or whose weights are others or damaged, is refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import YoutuConfig, YoutuForCausalLM

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


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_embedding_of_the_pad_token_is_the_file_s(tmp_path, is_tied):
    """An engine that reads the file itself has it, and a tied LM head makes logits of it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16}
    of_heads = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    facts = YoutuConfig(**sizes, **heads, **of_heads, tie_word_embeddings=is_tied, pad_token_id=3)
    saved = YoutuForCausalLM(facts)
    torch.nn.init.normal_(saved.get_input_embeddings().weight)
    saved.save_pretrained(tmp_path)
    model = load_pretrained(str(tmp_path), dtype=torch.float32, trust_remote_code=False)
    assert model.config.pad_token_id == 3
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    torch.testing.assert_close(model.state_dict(), saved.state_dict(), rtol=0, atol=0)
