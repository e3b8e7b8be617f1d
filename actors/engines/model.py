"""What an engine has to know of a model that another process runs: read from the model's folder.

Called by the engines whose model is not in this process.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from actors.engines.manifest import Shapes
from actors.engines.prompt import eos_set
from streamrl.config.model import ModelSettings


@dataclass(frozen=True)
class ModelFacts:
    """`shapes` of what a learner of this model sends, by name; `eos` tokens end a sequence."""

    shapes: Shapes
    eos: frozenset[int]
    vocab_size: int

    @classmethod
    def of(cls, model: ModelSettings) -> "ModelFacts":
        """Costs no memory: the model that is asked for its shapes has no storage."""
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(
                config, trust_remote_code=model.trust_remote_code
            )
        try:
            eos = GenerationConfig.from_pretrained(model.path).eos_token_id
        except OSError:
            eos = config.eos_token_id
        return cls(
            shapes={name: tuple(p.shape) for name, p in empty.named_parameters()},
            eos=eos_set(eos),
            vocab_size=config.get_text_config().vocab_size,
        )
