"""The tokens of a packed pass: where trajectories end, and what of them is computed once."""
