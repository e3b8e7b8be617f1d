"""Configuration: one YAML file, one frozen `RunConfig`, a section per owner. Imports no torch."""

from streamrl.config.loading import (
    LoadedConfig as LoadedConfig,
    load_config as load_config,
    render as render,
    to_yaml as to_yaml,
)
from streamrl.config.run_config import RunConfig as RunConfig
