"""`tracking`: where metrics go beside metrics.jsonl."""

from typing import Literal

from streamrl.config.numbers import NotNegative, Positive
from streamrl.config.section import Section


class SampleSettings(Section):
    """What is kept of the texts that the policy writes, in samples.jsonl."""

    num_groups: NotNegative = 1
    """Groups of each step, with all their siblings; 0 keeps none."""
    max_bytes: Positive = 64 * 2**20
    """Of samples.jsonl and of samples.1.jsonl, which has what came before, together; the oldest
    samples are deleted."""
    table_every: Positive = 10
    """Steps between two tables of samples in TensorBoard and Weights & Biases."""


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
    samples: SampleSettings = SampleSettings()
    """What is kept of the texts that the policy writes."""
