"""From text to a `RunConfig`, and back."""

from streamrl.config.loading.load import LoadedConfig, load_config
from streamrl.config.loading.rendering import render, to_yaml
from streamrl.config.loading.sources import PARENT_VARIABLE

__all__ = ["PARENT_VARIABLE", "LoadedConfig", "load_config", "render", "to_yaml"]
