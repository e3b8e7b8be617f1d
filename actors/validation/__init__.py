"""Validation: versions of the policy are scored on held-out prompts while a run trains."""
