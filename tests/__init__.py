"""Tests and benchmarks; a regular package, so that no installed package named `tests` hides it."""
