"""From parsed arguments to a configuration."""

import argparse

from streamrl.config import LoadedConfig, load_config
from streamrl.config.secrets import hand_down
from streamrl.errors import ConfigError


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration that the command is given, as an argument or as an option.

    Raises:
        ConfigError: none is given, or two, or it cannot be used.
    """
    loaded = load_config(config_file(arguments), arguments.overrides)
    hand_down(arguments, loaded.config.buffer.password_of_url)
    return loaded


def config_file(arguments: argparse.Namespace) -> str:
    """The one configuration file that the command is given."""
    given: list[str] = [path for path in (arguments.file, arguments.config) if path]
    if len(given) != 1:
        raise ConfigError("give one configuration file, as CONFIG or --config CONFIG")
    return given[0]
