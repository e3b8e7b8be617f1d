"""Facts of a model that another process runs, read from the model's folder."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from actors.engines.manifest import Shapes
from actors.engines.prompt import eos_set
from streamrl.config.model import ModelSettings


@dataclass(frozen=True)
class ModelFacts:
    """`shapes` of the parameters that a learner of this model sends, by name; `eos` tokens end a
    sequence; `head_width` is that of an attention head, None if the model has none."""

    shapes: Shapes
    eos: frozenset[int]
    vocab_size: int
    head_width: int | None = None

    @classmethod
    def of(cls, model: ModelSettings) -> "ModelFacts":
        """Costs no memory: the model is made on the meta device."""
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(
                config, trust_remote_code=model.trust_remote_code
            )
        try:
            eos = GenerationConfig.from_pretrained(model.path).eos_token_id
        except OSError:
            eos = config.eos_token_id
        text_config = config.get_text_config()
        return cls(
            shapes={name: tuple(p.shape) for name, p in empty.named_parameters()},
            eos=eos_set(eos),
            vocab_size=text_config.vocab_size,
            head_width=_head_width(text_config),
        )


def _head_width(config: PreTrainedConfig) -> int | None:
    width: int | None = getattr(config, "head_dim", None)
    num_heads: int | None = getattr(config, "num_attention_heads", None)
    return width or (config.hidden_size // num_heads if num_heads else None)
