"""`environments`: several in one run, or the one that `generator` names."""

from streamrl.config.environments.entries import EnvironmentEntry, entries_of
from streamrl.config.environments.settings import EnvironmentSettings

__all__ = ["EnvironmentEntry", "EnvironmentSettings", "entries_of"]
