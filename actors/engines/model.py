"""Facts about a model, read from its folder, and the checks that a prompt fits before it is sampled
and an update before it is received.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import structs
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from streamrl.config.generator import GeneratorSettings
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError, RolloutError, WeightTransferError
from streamrl.types import SamplingParams, TensorSpec
from streamrl.vision.families import empty_model, has_vision
from streamrl.vision.places import Placeholders
from streamrl.weights import lora


def device_of(setting: str) -> str:
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"


def fitted(
    sampling: SamplingParams, prompt_token_ids: Sequence[int], max_model_len: int, vocab_size: int
) -> SamplingParams:
    """The sampling parameters, limited so that the completion ends within the context.

    Raises:
        RolloutError: the prompt is empty, fills the context, or has ids outside the vocabulary,
            which would be read outside the embedding's memory.
    """
    room = max_model_len - len(prompt_token_ids)
    if not 0 < room < max_model_len:
        raise RolloutError(
            f"a prompt of {len(prompt_token_ids)} tokens leaves no room for a completion: "
            f"generator.max_model_len is {max_model_len}"
        )
    lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= vocab_size:
        raise RolloutError(
            f"a prompt has token ids from {lowest} to {highest}; "
            f"the model's vocabulary has {vocab_size}"
        )
    max_new_tokens = min(sampling.max_new_tokens, room)
    min_new_tokens = min(sampling.min_new_tokens, max_new_tokens)
    return structs.replace(sampling, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)


Shapes = Mapping[str, tuple[int, ...]]


def require_same_parameters(manifest: tuple[TensorSpec, ...], own: Shapes) -> None:
    """
    Raises:
        WeightTransferError: the manifest is of another model than these shapes.
    """
    if lora.is_of_factors(manifest):
        lora.require_fitting_factors(manifest, own)
        return
    offered = {spec.name: spec.shape for spec in manifest}
    for name in offered.keys() ^ own.keys():
        where = "the learner" if name in offered else "the engine"
        raise WeightTransferError(f"only {where}'s model has a parameter {name}")
    for name, shape in own.items():
        if offered[name] != shape:
            raise WeightTransferError(
                f"parameter {name}: the learner's is {offered[name]}, the engine's {shape}"
            )


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """`shapes` are those of the parameters that a learner of this model sends, by name; `eos`
    tokens end a sequence; `head_width` is the width of an attention head, None without
    attention."""

    shapes: Shapes
    eos: frozenset[int]
    vocab_size: int
    head_width: int | None = None
    placeholders: Placeholders | None = None
    """Of a model that sees images."""
    expert_shape: tuple[int, int] = (0, 0)
    """Decoder layers, and the experts that a token is given to in each."""
    has_experts: bool = False
    unsent: tuple[str, ...] = ()
    """Tensors of the model's files that no learner changes or sends: persistent buffers."""

    @classmethod
    def of(cls, model: ModelSettings) -> "ModelFacts":
        """Read the facts; allocates no weights."""
        empty = empty_model(model.path, trust_remote_code=model.trust_remote_code)
        config = empty.config
        text_config = config.get_text_config()
        width = getattr(text_config, "head_dim", None)
        num_heads = getattr(text_config, "num_attention_heads", None)
        return cls(
            shapes={name: tuple(p.shape) for name, p in empty.named_parameters()},
            eos=eos_token_ids(model),
            vocab_size=text_config.vocab_size,
            head_width=width or (text_config.hidden_size // num_heads if num_heads else None),
            placeholders=Placeholders.of(config) if has_vision(config) else None,
            expert_shape=(
                text_config.num_hidden_layers,
                getattr(text_config, "num_experts_per_tok", None) or 1,
            ),
            has_experts=any(
                ".experts." in n or ".router." in n for n, _ in empty.named_parameters()
            ),
            unsent=tuple(sorted(dict(empty.named_buffers()).keys() & empty.state_dict().keys())),
        )


def require_all_sent(generator: GeneratorSettings, facts: ModelFacts) -> None:
    """
    Raises:
        ConfigError: an engine that starts without weights would never get all of them.
    """
    if facts.unsent and generator.lacks_weights and generator.url is None:
        raise ConfigError(
            f"generator.{generator.engine}.load_format: was dummy, and the learner does not send "
            f"{facts.unsent[0]}, which the model's files have: leave it out"
        )


def eos_token_ids(model: ModelSettings) -> frozenset[int]:
    """The end-of-sequence tokens of the generation configuration, else of the model's
    configuration, else of the tokenizer. Without any, which is logged, completions end only at
    their longest length."""
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
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
