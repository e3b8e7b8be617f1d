"""From parsed arguments to a configuration; every command that takes one calls this."""

import argparse

from streamrl.config import LoadedConfig, load_config
from streamrl.errors import ConfigError


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration the command was given, by position or by name."""
    given = [path for path in (arguments.file, arguments.config) if path]
    if len(given) != 1:
        raise ConfigError("give one configuration file, as CONFIG or --config CONFIG")
    return load_config(given[0], arguments.overrides)
