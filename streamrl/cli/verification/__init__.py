"""Proofs from a run's files and the buffer's events, and the faults they are tried with."""
