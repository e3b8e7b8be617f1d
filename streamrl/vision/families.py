"""How transformers loads a model that sees images, and one that does not."""

from collections.abc import Collection
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from streamrl.errors import ConfigError
from streamrl.model_folder import VISION

_ZEROES_PADDING = frozenset({"youtu"})
"""Model types whose pad token's embedding transformers sets to 0 after loading, and with it the row
of a tied LM head."""


def has_vision(config: Any) -> bool:
    """Whether the model of this configuration takes images."""
    return config.model_type in VISION


def auto_model(config: Any) -> Any:
    """The auto class whose `from_pretrained` and `from_config` make the model of this
    configuration."""
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def empty_model(path: str, *, trust_remote_code: bool) -> Any:
    """The model of the folder or hub name without its weights, which costs no memory."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    # Without a dtype, transformers would change the default dtype of all threads meanwhile.
    with torch.device("meta"):
        return auto_model(config).from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def load_pretrained(
    path: str,
    *,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    setting: str = "model.path",
    needs_head: bool = True,
    **kwargs: Any,
) -> Any:
    """Load the model of a folder or hub name, with all of its weights. (transformers by itself
    would draw missing weights at random, different ones in each process.) `setting` names the
    folder; without `needs_head` the weights of the LM head may be missing, as in a reward model.

    Raises:
        OSError, ValueError: there is no model.
        ConfigError: its weights are damaged, or do not match its config.json.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    padding = getattr(config, "pad_token_id", None)
    if config.model_type in _ZEROES_PADDING and padding is not None:
        config.pad_token_id, kwargs = None, {**kwargs, "config": config}
    try:
        model, found = auto_model(config).from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **{"ignore_mismatched_sizes": True, **kwargs},
        )
    except SafetensorError as error:
        raise ConfigError(f"{setting}: the weights of {path} are damaged: {error}") from error
    head = None if needs_head else model.get_output_embeddings()
    unused = {n for n, module in model.named_modules() if module is head}
    missing = {key for key in found["missing_keys"] if key.rpartition(".")[0] not in unused}
    _require_whole(setting, path, missing, found["mismatched_keys"])
    if "config" in kwargs:
        model.config.pad_token_id = padding
    return model


def _require_whole(
    setting: str,
    path: str,
    missing: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]],
) -> None:
    if mismatched:
        name, there, wanted = min(mismatched)
        raise ConfigError(
            f"{setting}: {name} of {path} has the shape {tuple(there)}, and by its config.json "
            f"{tuple(wanted)}{_and_more(mismatched)}"
        )
    if missing:
        raise ConfigError(
            f"{setting}: {path} lacks weights that its config.json asks for: "
            f"{min(missing)}{_and_more(missing)}"
        )


def _and_more(names: Collection[object]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
