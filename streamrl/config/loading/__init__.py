"""From text to a `RunConfig`, and back."""

from streamrl.config.loading.load import LoadedConfig, load_config
from streamrl.config.loading.rendering import render, to_yaml
