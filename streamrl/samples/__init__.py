"""Samples: what the policy wrote, as a person reads it."""
