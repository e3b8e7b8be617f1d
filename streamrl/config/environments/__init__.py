"""`environments`: several in one run, or the one that `generator` names."""

from streamrl.config.environments.entries import (
    EnvironmentEntry as EnvironmentEntry,
    EnvironmentSettings as EnvironmentSettings,
    entries_of as entries_of,
)
