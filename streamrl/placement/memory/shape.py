"""The sizes of a model that memory follows from.

The parameters are counted in the headers of its files; their division into layers, and all of them
where there are no such files, follow from config.json as transformers has it for decoders like
Llama's. Called by the estimates beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config import RunConfig
from streamrl.config.model import RecipeSettings
from streamrl.errors import ConfigError
from streamrl.model_folder import local_folder

_NUM_SPECIAL_TOKENS = 4


@dataclass(frozen=True)
class ModelShape:
    """Widths are those of all heads together."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """That a token passes: of its experts, where there are some."""
    query_width: int
    key_value_width: int
    num_key_value_heads: int
    vocab_size: int
    num_embeddings: int
    """Parameters of the embedding and of an LM head of its own."""
    num_parameters: int

    @property
    def num_in_layer(self) -> int:
        """Parameters of one decoder layer."""
        return max(0, self.num_parameters - self.num_embeddings) // self.num_layers

    def kv_bytes_per_token(self, dtype_bytes: int, tensor_parallel: int = 1) -> int:
        """Keys and values of one token on one of the devices that share the heads (PagedAttention,
        arXiv 2309.06180, section 3); a device has one head at least."""
        heads = -(-self.num_key_value_heads // tensor_parallel)
        width = self.key_value_width // self.num_key_value_heads
        return 2 * self.num_layers * heads * width * dtype_bytes

    @classmethod
    def of(cls, config: RunConfig) -> "ModelShape | None":
        """Of the run's model; None where it is not on this machine, or is of another kind."""
        model = config.model
        if model.recipe is not None and not Path(model.path).exists():
            return cls.of_facts(_recipe_facts(model.recipe))
        folder = local_folder("model.path", model.path)
        try:
            return cls.of_facts(folder.config, folder.num_parameters) if folder else None
        except (ConfigError, KeyError, TypeError, ValueError):
            return None

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any], num_parameters: int = 0) -> "ModelShape":
        """Of the content of config.json; the parameters are counted by it where they are 0.

        Raises:
            KeyError: a size is missing.
        """
        hidden = _size(facts, "hidden_size", "n_embd")
        heads = _size(facts, "num_attention_heads", "n_head")
        key_value_heads = facts.get("num_key_value_heads") or heads
        width = facts.get("head_dim") or hidden // heads
        vocab_size = _size(facts, "vocab_size")
        inner = facts.get("intermediate_size") or facts.get("n_inner") or 4 * hidden
        is_tied = facts.get("tie_word_embeddings", True)
        shape = cls(
            num_layers=_size(facts, "num_hidden_layers", "n_layer"),
            hidden_size=hidden,
            intermediate_size=_active_width(facts, inner),
            query_width=heads * width,
            key_value_width=key_value_heads * width,
            num_key_value_heads=key_value_heads,
            vocab_size=vocab_size,
            num_embeddings=vocab_size * hidden * (1 if is_tied else 2),
            num_parameters=num_parameters,
        )
        return shape if num_parameters else shape._counted(facts)

    def _counted(self, facts: Mapping[str, Any]) -> "ModelShape":
        """With the parameters of gated MLPs (three matrices), attention and two norms a layer."""
        attention = 2 * self.hidden_size * (self.query_width + self.key_value_width)
        width = self.intermediate_size * _num_experts(facts) // _num_active(facts)
        layer = attention + 3 * self.hidden_size * width + 2 * self.hidden_size
        total = self.num_layers * layer + self.num_embeddings + self.hidden_size
        return ModelShape(**{**vars(self), "num_parameters": total})


def _size(facts: Mapping[str, Any], *names: str) -> int:
    value = next((facts[name] for name in names if facts.get(name)), None)
    if not isinstance(value, int):
        raise KeyError(names[0])
    return value


def _num_experts(facts: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return max(1, *(facts.get(name) or 1 for name in names))


def _num_active(facts: Mapping[str, Any]) -> int:
    return min(_num_experts(facts), facts.get("num_experts_per_tok") or 1)


def _active_width(facts: Mapping[str, Any], inner: int) -> int:
    if _num_experts(facts) == 1:
        return inner
    return _num_active(facts) * int(facts.get("moe_intermediate_size") or inner)


def _recipe_facts(recipe: RecipeSettings) -> Mapping[str, Any]:
    return {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "vocab_size": len(recipe.alphabet) + _NUM_SPECIAL_TOKENS,
        "tie_word_embeddings": False,
    }
