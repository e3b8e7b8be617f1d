"""`data`: the prompts, how they are rendered, and the reward of a response."""

from streamrl.config.data.rewards import RewardSettings
from streamrl.config.data.settings import DataSettings

__all__ = ["DataSettings", "RewardSettings"]
