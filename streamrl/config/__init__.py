"""Configuration: one YAML file, one frozen `RunConfig`, a section per owner. Imports no torch."""

from streamrl.config.loading.load import (
    LoadedConfig as LoadedConfig,
    load_config as load_config,
)
from streamrl.config.loading.rendering import (
    render as render,
    to_yaml as to_yaml,
)
from streamrl.config.run_config import RunConfig as RunConfig
