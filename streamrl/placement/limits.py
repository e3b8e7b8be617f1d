"""What a model's own configuration rules out: lengths, and ways of sharing it among ranks.

Learner and engine pass the facts of transformers' configuration, `streamrl check` those of
config.json; a missing fact rules out nothing.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from streamrl.errors import ConfigError

Facts = Mapping[str, Any]
"""Values of config.json, by transformers' names."""

_NAMES = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "layer_types",
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "index_topk",
)
_ATTENTION_LAYERS = frozenset({"full_attention", "attention", "sliding_attention"})
"""`attention` is what files of older models call `full_attention`."""
_ROPES_OF_THE_ROW = frozenset({"longrope", "dynamic"})
"""Position embeddings that depend on the longest trajectory of a row, not on the token's place."""
_CACHES = frozenset({"minimax", "rwkv", "xlstm"})
"""Models that have their own kind of cache."""
_INEXACT = frozenset({"doge", "nemotron_h", "recurrent_gemma", "zamba2"})
"""Models whose results with transformers' cache differ from those without; the same holds for
models that choose the keys of a token by an index."""
_STATEFUL = frozenset(
    {
        *("bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid"),
        *("jamba", "kimi_linear", "mamba", "mamba2", "minicpmv4_6", "minicpmv4_7", "minimax"),
        *("nemotron_h", "nemotron_h_omni", "olmo_hybrid", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text"),
        *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
    }
)
"""Model types with layers that carry a state from token to token."""
LIGER_FAMILIES = frozenset(
    {
        *("exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense"),
        *("llama", "ministral", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"),
    }
)
"""Model types whose gradients with Liger's kernels are known to equal the plain ones."""


def facts_of(config: object) -> Facts:
    """The facts of a transformers configuration of a language model."""
    return {name: getattr(config, name, None) for name in _NAMES}


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _each(counts: int | list[int] | None) -> list[int]:
    """A count of every layer, or one for each; [] if there is none."""
    return counts if isinstance(counts, list) else [counts] if counts else []


def num_experts(facts: Facts) -> int:
    """The most experts that a layer has; 1 for a model without."""
    counts = (count for name in _NUM_EXPERTS for count in _each(facts.get(name)))
    return max(counts, default=1)


def require_experts(facts: Facts, setting: str) -> None:
    """Raise ConfigError if the model is no mixture of experts, which `setting` requires."""
    if facts.get("model_type") and num_experts(facts) == 1:
        raise ConfigError(
            f"{setting}, and {facts.get('model_type')} is no mixture of experts: no token is given "
            "to some of them. Set it to off"
        )


def expert_bytes(facts: Facts) -> int:
    """Bytes of a token's recorded experts in all layers; 0 for a model without."""
    num_taken = facts.get("num_experts_per_tok") or facts.get("moe_k") or 0
    id_bytes = 1 if num_experts(facts) <= 2**8 else 2
    return id_bytes * int(num_taken) * int(facts.get("num_hidden_layers") or 0)


def carries_state(facts: Facts) -> bool:
    """Whether layers carry a state from token to token, as recurrent layers and linear attention
    do."""
    is_linear = "linear_attention" in (facts.get("layer_types") or ())
    return is_linear or facts.get("model_type") in _STATEFUL


def require_compilable(family: object, *, has_state: bool) -> None:
    """Raise ConfigError if the model's layers carry a state."""
    if has_state:
        raise ConfigError(
            f"learner.compile: was true, and layers of {family} carry a state from token to "
            "token, in loops that would be compiled anew for each length; auto compiles what can be"
        )


def why_without_liger(family: object, num_tensor: int) -> str | None:
    """Why layers of this `model_type`, divided among `num_tensor` ranks, cannot use Liger's
    kernels; None if they can."""
    if family not in LIGER_FAMILIES:
        return f"its kernels are not known to compute {family} as transformers does"
    if num_tensor != 1:
        return f"learner.mesh.tensor is {num_tensor}: its kernels take whole matrices"
    return None


def require_liger(why_not: str | None) -> None:
    """Raise ConfigError if there is a reason against Liger's kernels."""
    if why_not is not None:
        raise ConfigError(
            f"learner.liger_layers: was true, and {why_not}; auto takes what can be used"
        )


def require_shared_tokens(facts: Facts, size: int, num_tensor: int = 1, *, has_state: bool) -> None:
    """Raise ConfigError if `size` x `num_tensor` ranks cannot share the model's heads, or
    trajectories cannot be cut because of other layers or position embeddings."""
    name, setting = facts.get("model_type"), f"learner.mesh.sequence: was {size}"
    # Hybrid families also have models with attention only, whose `layer_types` say so.
    types = facts.get("layer_types") or (["recurrent ones"] if has_state else ())
    if others := sorted({*types} - _ATTENTION_LAYERS):
        raise ConfigError(
            f"{setting}, which exchanges attention heads for tokens, and {name} has layers that "
            f"are no attention ({', '.join(others)}): set it to 1"
        )
    if row := sorted(_ropes(facts).keys() & _ROPES_OF_THE_ROW):
        raise ConfigError(
            f"{setting}, which cuts trajectories, and the {row[0]} position embedding of {name} "
            "depends on their whole length: set it to 1"
        )
    heads = facts.get("num_attention_heads") or facts.get("n_head")
    if heads and heads % (size * num_tensor):
        by = f" x learner.mesh.tensor {num_tensor}" if num_tensor > 1 else ""
        raise ConfigError(
            f"{setting}{by}, which does not divide the {heads} attention heads of {name}"
        )


def require_shared_matrices(facts: Facts, size: int) -> None:
    """Raise ConfigError if `size` does not divide the heads or the MLP columns of the model."""
    counts = {
        "attention heads": facts.get("num_attention_heads"),
        "key-value heads": facts.get("num_key_value_heads"),
        "columns of an MLP": facts.get("intermediate_size"),
    }
    for what, given in counts.items():
        if count := next((count for count in _each(given) if count % size), None):
            raise ConfigError(
                f"learner.mesh.tensor: was {size}, which does not divide the {count} {what} of "
                f"{facts.get('model_type')}"
            )


def require_undivided_images(facts: Facts, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if ranks would share the tokens or matrices of a model that sees images;
    `sizes` are the sizes of the mesh's axes."""
    for axis, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"learner.mesh.{axis}: was {size}; it must be 1 for a model that sees images, such "
                f"as this {facts.get('model_type')}"
            )


def require_decoding(facts: Facts, max_model_len: int) -> None:
    """Raise ConfigError if engine hf would not give the log-probabilities of a forward pass, or not
    for sequences of this length."""
    kind = facts.get("model_type")
    if kind in _CACHES | _INEXACT or facts.get("index_topk"):
        reason = "which has a cache of its own" if kind in _CACHES else "whose cache is inexact"
        raise ConfigError(f"generator.engine: hf cannot decode {kind}, {reason}: use vllm")
    for rope, limit in rope_limits(facts).items():
        if max_model_len > limit:
            raise ConfigError(
                f"generator.max_model_len: was {max_model_len}, and with {rope} positions of "
                f"{kind} generator.engine hf is exact up to {limit:g} tokens"
            )


def require_length(facts: Facts, longest: int) -> None:
    """Raise ConfigError if the learner cannot compute a trajectory of `longest` tokens."""
    limit = rope_limits(facts).get("dynamic", inf)
    if longest > limit:
        raise ConfigError(
            f"generator.max_model_len: allows trajectories of {longest} tokens, and beyond "
            f"{limit:g} the dynamic position embedding of {facts.get('model_type')} depends on "
            "what it computed before"
        )


def rope_limits(facts: Facts) -> dict[str, float]:
    """By kind of position embedding, the length beyond which a token's embedding depends on the
    other tokens of the row."""
    longest = facts.get("max_position_embeddings") or inf
    own = facts.get("original_max_position_embeddings") or longest
    otherwise = {"dynamic": longest, "longrope": own}
    return {
        kind: float(rope.get("original_max_position_embeddings") or otherwise[kind])
        for kind, rope in _ropes(facts).items()
        if kind in otherwise
    }


def _ropes(facts: Facts) -> dict[str, Mapping[str, Any]]:
    """Return the rotary embeddings by kind; a model may have one for each kind of layer."""
    given = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    found = [rope for rope in (given, *given.values()) if isinstance(rope, Mapping)]
    return {str(rope.get("rope_type") or rope.get("type")): rope for rope in found}
