"""`generator`: the sampling of one generator and its engine."""

from streamrl.config.generator.settings import GeneratorSettings
from streamrl.config.generator.tools import CallLimits, McpServerSettings, ToolSettings

__all__ = ["CallLimits", "GeneratorSettings", "McpServerSettings", "ToolSettings"]
