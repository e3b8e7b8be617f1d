"""Facts of a model, read from its folder."""

import logging
from dataclasses import dataclass

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from actors.engines.manifest import Shapes
from actors.engines.prompt import eos_set
from streamrl.config.model import ModelSettings
from streamrl.vision.families import auto_model, has_vision
from streamrl.vision.places import Placeholders

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """`shapes` of the parameters that a learner of this model sends, by name; `eos` tokens end a
    sequence; `head_width` is that of an attention head, None if the model has none."""

    shapes: Shapes
    eos: frozenset[int]
    vocab_size: int
    head_width: int | None = None
    placeholders: Placeholders | None = None
    """Of a model that sees images."""

    @classmethod
    def of(cls, model: ModelSettings) -> "ModelFacts":
        """Costs no memory: the model is made on the meta device."""
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            empty = auto_model(config).from_config(
                config, trust_remote_code=model.trust_remote_code
            )
        text_config = config.get_text_config()
        return cls(
            shapes={name: tuple(p.shape) for name, p in empty.named_parameters()},
            eos=eos_token_ids(model),
            vocab_size=text_config.vocab_size,
            head_width=_head_width(text_config),
            placeholders=Placeholders.of(config) if has_vision(config) else None,
        )


def eos_token_ids(model: ModelSettings) -> frozenset[int]:
    """The end-of-sequence tokens: those of the generation configuration, else of the model's, else
    of the tokenizer. Without any, which is logged, completions end at their longest length."""
    trust = model.trust_remote_code
    try:
        eos = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=trust)
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    if eos is None:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path, trust_remote_code=trust)
        eos = tokenizer.eos_token_id
    if eos is None:
        log.warning(
            "model.path: %s has no end-of-sequence token, and generator.stop_token_ids are the "
            "only ones that end a completion before generator.max_new_tokens",
            model.path,
        )
    return eos_set(eos)


def _head_width(config: PreTrainedConfig) -> int | None:
    width: int | None = getattr(config, "head_dim", None)
    num_heads: int | None = getattr(config, "num_attention_heads", None)
    return width or (config.hidden_size // num_heads if num_heads else None)
