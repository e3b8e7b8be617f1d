"""Which tokens end a sequence, where a model's folder says so in one place, another or none."""

import json
from pathlib import Path

import pytest

from actors.engines.model import eos_token_ids
from streamrl.config.model import ModelSettings
from tests.tiny_model import make_llama


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path) -> Path:
    make_llama(eos_token_id=None).save_pretrained(tmp_path)
    for file in tokenizer.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 7}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    return folder


def put(file: Path, eos: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, "eos_token_id": eos}))


def test_each_place_counts_where_those_before_it_say_nothing(folder):
    model = ModelSettings(path=str(folder))
    assert eos_token_ids(model) == {7}
    put(folder / "config.json", 5)
    assert eos_token_ids(model) == {5}
    put(folder / "generation_config.json", [3, 4])
    assert eos_token_ids(model) == {3, 4}


def test_a_model_without_any_is_logged(folder, caplog):
    special = folder / "tokenizer_config.json"
    content = json.loads(special.read_text())
    special.write_text(json.dumps({**content, "eos_token": None}))
    assert eos_token_ids(ModelSettings(path=str(folder))) == frozenset()
    assert "has no end-of-sequence token" in caplog.text
