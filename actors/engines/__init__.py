"""Inference engines behind one interface.

A new engine implements `streamrl.interfaces.Engine`, passes `tests/contract/test_engines.py`, and
gets a line in `make_engine`.
"""

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Engine


def make_engine(config: RunConfig, *, seed: int) -> Engine:
    """The engine that `generator.engine` names, its weights loaded; call it in the event loop.

    `seed` is that of sampling; generators of one run differ in it.
    """
    match config.generator.engine:
        case "hf":
            from actors.engines.hf.engine import HfEngine

            return HfEngine.from_config(config, seed=seed)
        case name:
            raise ConfigError(f"generator.engine: was {name!r}; {did_you_mean(name, ['hf'])}")
