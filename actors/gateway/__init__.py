"""Agents that call the policy as they would call a model's API, and sessions that record the
calls."""
