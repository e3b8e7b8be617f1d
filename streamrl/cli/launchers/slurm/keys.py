"""Keys of a run on several nodes whose configuration names none.

Invariant: they are made once for a run and stand in its folder, which all nodes see and the owner
alone can read. Called when a job is submitted, and within an allocation.
"""

from streamrl.config import RunConfig
from streamrl.curve import make_keys

_FOLDER = "keys"


def with_keys(config: RunConfig) -> RunConfig:
    """With keys in the run's folder."""
    buffer = config.buffer.model_copy(update={"curve": config.run.path / _FOLDER})
    return config.model_copy(update={"buffer": buffer})


def make_missing_keys(config: RunConfig) -> None:
    """Those of `with_keys`."""
    if not (config.run.path / _FOLDER).exists():
        make_keys(config.run.path / _FOLDER)
