"""`tracking`: where metrics go beside metrics.jsonl."""

from typing import Literal

from streamrl.config.section import Section


class TrackingSettings(Section):
    """metrics.jsonl is always written."""

    console: bool = True
    """One line a step in the learner's log."""
    tensorboard: bool = False
    """Event files in the run folder (extra: tensorboard)."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases (extra: wandb)."""
    project: str = "streamrl"
    """Project name at Weights & Biases."""
