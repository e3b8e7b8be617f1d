"""Agents that call the policy as they would call a model's API, and the sessions that record it."""
