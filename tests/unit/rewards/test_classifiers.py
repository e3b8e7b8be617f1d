"""A conversation has the score that it has alone, whatever its tokens and its company are."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from actors.rewards.reward_model import PADDED, check_family, logits_of, may_be_padded
from streamrl.errors import ConfigError
from tests.model_families import _SETTINGS, FAMILIES

BOS_OR_PAD, EOS, LAST = 0, 1, 63
CAUSAL = {
    name: settings
    for name, settings in FAMILIES.items()
    if settings["model_type"] in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
}
SMALL = {
    "embedding_size": 32,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "dim": 32,
    "hidden_dim": 48,
    "n_heads": 4,
    "num_key_value_heads": None,
    "head_dim": None,
    "rotary_dim": 4,
}
ENCODERS = {
    kind: {"model_type": kind, **SMALL}
    for kind in PADDED - {settings["model_type"] for settings in CAUSAL.values()}
}
APART = {
    "FNet": {"model_type": "fnet", **SMALL},
    "XLNet": {
        "model_type": "xlnet",
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 48,
        "max_position_embeddings": None,
    },
    "Phi-3 with LongRoPE": CAUSAL.pop("Phi-3 with LongRoPE"),
}
"""By family, what padding would change."""
TOGETHER = {**CAUSAL, **dict(sorted(ENCODERS.items()))}
"""By family, what may be padded."""

ROWS = [
    [5, 9, EOS],
    [EOS, 7, EOS, 12, 3, 40, EOS, 8],
    [4, BOS_OR_PAD, 30, 31, EOS, EOS],
    [50, 2, BOS_OR_PAD],
    [*range(2, 22), EOS],
]
"""With and without an end; the end in the middle, too; the pad token within and at the end."""


def classifier(own: dict[str, Any], num_labels: int = 2) -> Any:
    settings = {**_SETTINGS["base"], **own, "num_labels": num_labels}
    config = AutoConfig.for_model(**{k: v for k, v in settings.items() if v is not None})
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@torch.inference_mode()
def alone(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Each in a batch of one, unpadded, of a model that searches no pad token."""
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = None
    return torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])


@torch.inference_mode()
def together(model: Any, rows: Sequence[Sequence[int]], pad: int | None) -> torch.Tensor:
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = pad
    return logits_of(model, rows, pad)


def test_every_model_type_that_is_padded_is_tested():
    assert {settings["model_type"] for settings in TOGETHER.values()} == PADDED


@pytest.mark.parametrize("family", TOGETHER)
def test_conversations_of_different_lengths_score_as_alone(family):
    model = classifier(TOGETHER[family])
    assert may_be_padded(model.config)
    expected = alone(model, ROWS)
    assert len({round(float(score), 3) for score in expected[:, 0]}) == len(ROWS)
    for pad in (None, EOS, BOS_OR_PAD, LAST):
        assert torch.allclose(together(model, ROWS, pad), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", APART)
def test_conversations_of_one_length_need_no_padding(family):
    model = classifier(APART[family])
    assert not may_be_padded(model.config)
    for length in (3, 20):
        rows = [(row * 7)[:length] for row in ROWS]
        assert torch.allclose(together(model, rows, EOS), alone(model, rows), atol=1e-4)


def test_where_every_token_is_used_each_is_scored_alone():
    model = classifier(FAMILIES["Llama"])
    rows = [[*range(64)], [*range(30), EOS]]
    assert torch.allclose(together(model, rows, EOS), alone(model, rows), atol=1e-5)


@pytest.mark.parametrize("kind", ["bart", "mbart", "t5", "t5gemma"])
def test_an_encoder_with_a_decoder_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f"path: the model is of type {kind}, an encoder with a"):
        check_family(AutoConfig.for_model(kind))


def test_a_family_without_a_classifier_is_refused_by_name():
    with pytest.raises(ConfigError, match="of type rwkv, and transformers has no sequence class"):
        check_family(AutoConfig.for_model("rwkv"))
    check_family(AutoConfig.for_model("qwen3"))
