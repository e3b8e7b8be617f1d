"""Which models see images, and the class of transformers that loads a model.

A family is here if its vision tower takes patches with their grid and its text model takes
positions of three axes, as Qwen2-VL's do; see tower.py.
"""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from streamrl.errors import ConfigError

VISION = frozenset({"qwen2_vl", "qwen2_5_vl"})


def has_vision(config: Any) -> bool:
    """Whether the model of this configuration takes images."""
    return config.model_type in VISION


def auto_model(config: Any) -> Any:
    """The class whose `from_pretrained` and `from_config` make the model of this configuration."""
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def auto_model_at(path: str, *, trust_remote_code: bool) -> Any:
    """As `auto_model`, of the folder or hub name.

    Raises:
        OSError, ValueError: there is no model.
    """
    return auto_model(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))


def require_without_vision(config: Any, setting: str) -> None:
    """
    Raises:
        ConfigError: the model has a vision tower, which `setting` leaves out.
    """
    if has_vision(config):
        raise ConfigError(f"{setting}: must be left out for {config.model_type}, which sees images")
