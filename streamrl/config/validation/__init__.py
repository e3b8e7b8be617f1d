"""`validation`: held-out prompts that are sampled and scored while a run trains."""

from streamrl.config.validation.settings import EarlyStopSettings, ValidationSettings

__all__ = ["EarlyStopSettings", "ValidationSettings"]
