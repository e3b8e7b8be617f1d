"""`environments`: several in one run, or the one that `generator` names."""

from streamrl.config.environments.entries import EnvironmentEntry, EnvironmentSettings, entries_of
