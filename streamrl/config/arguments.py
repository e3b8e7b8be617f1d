"""From parsed arguments to a configuration."""

import argparse

from streamrl.config import LoadedConfig, load_config
from streamrl.errors import ConfigError


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration that the command is given, as an argument or as an option.

    Raises:
        ConfigError: none is given, or two, or it cannot be used.
    """
    given = [path for path in (arguments.file, arguments.config) if path]
    if len(given) != 1:
        raise ConfigError("give one configuration file, as CONFIG or --config CONFIG")
    return load_config(given[0], arguments.overrides)
