"""The model of an HF engine, as transformers loads it. Called when the engine starts.

Invariant: `generator.engine_kwargs` add to what the settings say, and contradict none of it.
"""

import torch
from transformers import PreTrainedModel

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.vision.families import load_pretrained

_FIXED = {"dtype", "torch_dtype", "trust_remote_code"}


def load_model(config: RunConfig) -> PreTrainedModel:
    """The model at `model.path` in `generator.dtype`, on the CPU.

    Raises:
        ConfigError: there is none, or not all of it, or it cannot be made with
            `generator.engine_kwargs`.
    """
    path, trust = config.model.path, config.model.trust_remote_code
    kwargs = config.generator.engine_kwargs
    if clash := sorted(_FIXED & kwargs.keys()):
        raise ConfigError(f"generator.engine_kwargs.{clash[0]}: is set by StreamRL; leave it out")
    try:
        dtype = getattr(torch, config.generator.dtype)
        model: PreTrainedModel = load_pretrained(
            path, dtype=dtype, trust_remote_code=trust, **kwargs
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        if kwargs:
            names = ", ".join(kwargs)
            raise ConfigError(
                f"model.path {path!r} with generator.engine_kwargs ({names}): {error}"
            ) from error
        if isinstance(error, TypeError | ImportError):
            raise
        raise ConfigError(f"model.path: no model at {path!r}: {error}") from error
    return model
