"""Configuration: one YAML file, one frozen `RunConfig`, a section per owner. Imports no torch."""

from streamrl.config.loading import LoadedConfig, load_config, render, to_yaml
from streamrl.config.run_config import RunConfig
