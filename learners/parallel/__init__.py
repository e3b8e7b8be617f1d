"""The ranks of a learner: what they exchange, and the mesh in which they stand."""
