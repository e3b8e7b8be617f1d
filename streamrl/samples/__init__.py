"""Samples: what the policy wrote, as a person reads it."""

from streamrl.samples.record import (
    ImportanceWeights as ImportanceWeights,
    Message as Message,
    Sample as Sample,
    sample_of as sample_of,
)
