"""Sequence classifiers of transformers: which of them score a conversation, and the forward pass.

A causal one reads its score at the last token that is not the pad token of its configuration, which
is too early where the conversation ends with that token. Invariant: here that token is one which no
conversation of the pass has, so that each is scored as it would be alone. Padding behind the last
token changes nothing in a causal model; an encoder of `PADDED` leaves it out by its mask; every
other model is given conversations of one length, and no padding. So is one whose rotary frequencies
change with the length of a pass.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig

from streamrl.errors import ConfigError

_CAUSAL = """
arcee bloom deepseek_v2 deepseek_v3 diffllama doge exaone4 falcon gemma gemma2 gemma3_text glm glm4
gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium hunyuan_v1_dense jamba jetmoe llama minicpm3
minimax ministral ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 opt
phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm
starcoder2 zamba2
"""
_ENCODERS = """
albert bert camembert deberta deberta-v2 distilbert electra modernbert mpnet roberta xlm-roberta
"""
PADDED = frozenset([*_CAUSAL.split(), *_ENCODERS.split()])
"""Model types whose scores padding on the right does not change; each is tested."""
_BY_LENGTH = frozenset({"dynamic", "longrope"})
_NONE = -1


def may_be_padded(config: PreTrainedConfig) -> bool:
    """Whether conversations of different lengths may share a pass."""
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # One for all layers, or one by their type.
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    kinds = {own.get("rope_type") for own in (rotary, *nested)}
    return config.model_type in PADDED and not kinds & _BY_LENGTH


def check_family(config: PreTrainedConfig) -> None:
    """Whether a classifier of this model type scores a conversation as a whole.

    Raises:
        ConfigError: it does not, or there is no classifier of this type.
    """
    kind, remote = config.model_type, getattr(config, "auto_map", None) or {}
    if config.is_encoder_decoder:
        raise ConfigError(
            f"path: the model is of type {kind}, an encoder with a decoder, which reads its score "
            "at end-of-sequence tokens of the conversation; use a causal model or an encoder"
        )
    is_known = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not is_known and "AutoModelForSequenceClassification" not in remote:
        raise ConfigError(
            f"path: the model is of type {kind}, and transformers has no sequence classifier of it"
        )


def logits_of(
    model: Any, rows: Sequence[Sequence[int]], pad_token_id: int | None = None
) -> torch.Tensor:
    """[B, labels] of conversations that are given as token ids, each as if it stood alone.

    Args:
        rows: of one length, unless the model `may_be_padded`.
        pad_token_id: is padded with, if no conversation has it.
    """
    longest = max(map(len, rows))
    pad = _NONE
    if any(len(row) < longest for row in rows):
        pad = _unused(rows, model.config.get_text_config().vocab_size, pad_token_id)
        if pad == _NONE:
            return torch.cat([logits_of(model, [row]) for row in rows])
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    # By it the model finds the last token of each row.
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = pad
    logits: torch.Tensor = model(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device)
    ).logits
    return logits.float()


def _unused(rows: Sequence[Sequence[int]], vocab_size: int, preferred: int | None) -> int:
    """A token that no row has."""
    used = {token for row in rows for token in row}
    candidates = chain([] if preferred is None else [preferred], range(vocab_size))
    return next((token for token in candidates if token not in used), _NONE)
