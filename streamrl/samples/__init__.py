"""Samples: what the policy wrote, as a person reads it."""

from streamrl.samples.record import ImportanceWeights, Message, Sample, sample_of
