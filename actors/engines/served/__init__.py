"""Engines whose model another process serves over HTTP."""
