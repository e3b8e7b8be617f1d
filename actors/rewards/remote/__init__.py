"""Rewards behind a URL: a judge, a sandbox, and any service that scores episodes."""
