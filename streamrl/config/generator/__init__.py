"""`generator`: the sampling of one generator and its engine."""

from streamrl.config.generator.settings import GeneratorSettings

__all__ = ["GeneratorSettings"]
