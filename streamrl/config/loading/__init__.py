"""From text to a `RunConfig`, and back."""

from streamrl.config.loading.load import (
    LoadedConfig as LoadedConfig,
    load_config as load_config,
)
from streamrl.config.loading.rendering import (
    render as render,
    to_yaml as to_yaml,
)
